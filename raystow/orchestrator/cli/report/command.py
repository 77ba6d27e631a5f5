"""``raystow report``: a run's checkpoints as a page to read."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....storage.clock import SYSTEM
from ....storage.errors import Unsupported
from ..bill import Prices
from ..present import count, emit, err, out, printable, ratio, size
from ..target import Json, Uri, open_target

if TYPE_CHECKING:
    from .facts import Facts, Tariff


def report(
    uri: Uri,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page; replaced if it is there.", dir_okay=False)
    ] = Path("report.html"),
    store_price: Annotated[
        float | None, typer.Option(min=0, metavar="$", help="Of a GB (10^9 bytes) in the store for a month.")
    ] = None,
    gpu_price: Annotated[float | None, typer.Option(min=0, metavar="$", help="Of one GPU for an hour.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="GPUs that wait in a save; by default one for each rank.")
    ] = None,
    newest: Annotated[int, typer.Option(min=1, metavar="N", help="So many versions are looked at.")] = 500,
    json: Json = False,
) -> None:
    """Make a page of a run's checkpoints: their size, what they cost the training and in dollars, and what was restored.

    One HTML file with its plots, which needs no network and no other file. Reads the root and one small record for each
    version. Needs matplotlib and Jinja: pip install "raystow[report]".

    Example:  raystow report s3://bucket/runs/llama -o report.html --store-price 0.023 --gpu-price 4.40
    """
    _require_plotting()
    from .facts import gather
    from .page import render

    facts = gather(open_target(uri), newest=newest, tariff=_tariff(store_price, gpu_price, gpus))
    _write(output, render(facts))
    if json:
        emit({"output": str(output.resolve()), **_fields(facts)})
        return
    what = f"{count(len(facts.versions), 'version')} of {facts.live:,}, {count(len(facts.restores), 'restore')}"
    out.print(f"{output}: {what}, {size(facts.live_stored)} stored", soft_wrap=True)
    for saved in facts.problems:
        err.print(f"warning: the record of version {saved.id} cannot be read: {printable(saved.problem)}", soft_wrap=True)


def _require_plotting() -> None:
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise Unsupported(f"a report needs {' and '.join(missing)}", remedy='pip install "raystow[report]"')


def _tariff(store_price: float | None, gpu_price: float | None, gpus: int | None) -> Tariff | None:
    from .facts import Tariff

    if store_price is None and gpu_price is None:
        if gpus is not None:
            raise typer.BadParameter("--gpus needs --gpu-price")
        return None
    if not all(price is None or price < float("inf") for price in (store_price, gpu_price)):
        raise typer.BadParameter("prices are finite numbers")
    return Tariff(Prices(gpu_price or 0.0, store_price or 0.0), gpus)


def _write(path: Path, page: str) -> None:
    """All of it or, if that fails, what was there before. ``OSError`` names ``path``."""
    work = path.with_name(f".{path.name}.{SYSTEM.token()}")
    try:
        work.write_text(page, encoding="utf-8")
        os.replace(work, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # moved into place, or never made
            work.unlink()


def _fields(facts: Facts) -> dict[str, Any]:
    versions = []
    for number, saved in enumerate(facts.versions):
        fields = asdict(saved)
        del fields["restores"]
        fields["ratio"] = ratio(saved.stored, saved.raw)
        fields["dollars"] = asdict(facts.dollars[number]) if facts.dollars else None
        versions.append(fields)
    return {
        "uri": facts.uri,
        "repository": facts.repository,
        "made": facts.made,
        "live": facts.live,
        "stored": facts.live_stored,
        "versions": versions,
        "restores": [asdict(restore) for restore in facts.restores],
    }
