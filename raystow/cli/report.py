"""``raystow report``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from ..storage.errors import StateError
from ..storage.real_paths import output_path
from ..storage.runtime.clock import SYSTEM
from . import options
from .options import Json, Uri, number
from .output import count, emit, err, fields_of, out, printable, ratio, size
from .pricing import Prices
from .run_history import RunHistory, Tariff, read_history
from .target import open_target


def report(
    uri: Uri,
    output: Annotated[Path, options.file("--output", "-o", help="The page; an existing file is replaced.")] = Path("report.html"),
    store_price: Annotated[float | None, options.store_price] = None,
    gpu_price: Annotated[float | None, options.gpu_price] = None,
    gpus: Annotated[int | None, options.gpus(help="GPUs that wait during a stall; by default one per rank.")] = None,
    newest: Annotated[int, number(help="Include the newest N versions.")] = 500,
    json: Json = False,
) -> None:
    """Create an HTML page about a run's checkpoints.

    Interactive plots and tables of size and ratio, stalls, time lost by interval, sources of restores, exports, metrics and, with
    prices, the cost so far. The page is one file of 5 MB and needs no network. Dropped versions, restores without a later save,
    and stalls of saves by raystow.dcp are not included. Requires pip install "raystow[report]".

    Example:  raystow report s3://bucket/runs/llama -o report.html --store-price 0.023 --gpu-price 4.40
    """
    from .report_page import render

    history = read_history(open_target(uri), newest=newest, tariff=_tariff(store_price, gpu_price, gpus))
    page = output_path(output)
    _write(page, render(history))
    if json:
        emit({"output": str(page), **_fields(history)})
        return
    what = f"{count(len(history.versions), 'version')} of {history.live:,}, {count(len(history.restores), 'restore')}"
    out.print(f"{output}: {what}, {size(history.live_stored)} stored")
    for saved in history.problems:
        err.print(f"warning: the record of version {saved.id} cannot be read: {printable(saved.problem)}")
    for place, error in history.failed_exports.items():
        err.print(printable(f"warning: the export to {place} failed: {error}"))


def _tariff(store_price: float | None, gpu_price: float | None, gpus: int | None) -> Tariff | None:
    if gpus is not None and gpu_price is None:
        raise typer.BadParameter("--gpus requires --gpu-price")
    if store_price is None and gpu_price is None:
        return None
    return Tariff(Prices(gpu_price or 0.0, store_price or 0.0), gpus)


def _write(path: Path, page: str) -> None:
    """Replace the file atomically; an ``OSError`` names ``path``."""
    if path.exists() and not path.is_file():  # such as /dev/null, which would become a file
        raise StateError("is not a regular file", subject=str(path), remedy="use another path")
    work = path.with_name(f".{path.name}.{SYSTEM.token()}")
    try:
        work.write_text(page, encoding="utf-8")
        os.replace(work, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # moved into place, or never created
            work.unlink()


def _fields(history: RunHistory) -> dict[str, object]:
    versions = []
    for saved in history.versions:
        fields = fields_of(saved)
        del fields["restores"], fields["metrics"], fields["origin"]
        versions.append({**fields, "ratio": ratio(saved.stored, saved.raw)})
    return {
        "uri": history.uri,
        "repository": history.repository,
        "made": history.made,
        "live": history.live,
        "stored": history.live_stored,
        "versions": versions,
        "restores": [{**fields_of(restore), "read": dict(restore.read)} for restore in history.restores],
        "exports": dict(history.exports),
        "failed_exports": dict(history.failed_exports),
    }
