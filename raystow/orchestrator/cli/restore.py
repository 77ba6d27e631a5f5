"""``raystow restore``: a version as files that other tools open."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .present import count, emit, out, printable, size
from .progress import byte_bar
from .target import LATEST, Json, Uri, open_target

if TYPE_CHECKING:
    from .safetensors_file import File

_LISTED = 10  # notes on single tensors; the rest is counted


def restore(
    uri: Uri,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new or empty folder.", show_default=False)],
    version: Annotated[
        str, typer.Option("--version", metavar="VERSION", help="A version's id, the name of a pin, or 'latest'.")
    ] = LATEST,
    max_file_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Split a group's file above this size, between tensors.")
    ] = 5120,
    json: Json = False,
) -> None:
    """Write a version's tensors as safetensors files and its other values as values.json.

    One file for each group (weights, optimizer), split into numbered ones above 5 GiB. Every digest is checked. The folder
    appears when all is written; a run that fails or is interrupted leaves nothing behind.

    Example:  raystow restore s3://bucket/runs/llama --to ./llama-final
    """
    from . import export
    from .new_folder import new_folder
    from .safetensors_file import files

    target = open_target(uri)
    chosen = target.version(version)
    start = target.repository.clock.monotonic()
    with target.repository.lease(chosen):
        plan, values = files(chosen.tensors(), limit=max_file_mib << 20), export.plain_values(chosen)
        total = sum(file.nbytes for file in plan)
        with new_folder(to, total) as folder, byte_bar(f"version {chosen.id}", total, quiet=json) as advance:
            for file in plan:
                export.write_file(folder / file.name, file, chosen, advance)
            for _, parts in groupby(plan, key=lambda file: file.group):
                if len(split := list(parts)) > 1:
                    export.write_index(folder, split)
            export.write_json(folder / "values.json", values)
    facts = {
        "uri": target.repository.uri,
        "version": chosen.id,
        "step": chosen.step,
        "directory": str(to.expanduser().resolve()),
        "files": [{"name": file.name, "group": file.group, "tensors": len(file.tensors), "nbytes": file.nbytes} for file in plan],
        "values": len(values["values"]),
        "mapped": _mapped(plan),
        "seconds": round(target.repository.clock.monotonic() - start, 3),
    }
    if json:
        emit(facts)
    else:
        _tell(facts)


def _mapped(plan: list[File]) -> dict[str, dict[str, Any]]:
    return {
        placed.name: {"dtype": placed.info.dtype, "stored_as": placed.form, "shape": placed.shape}
        for file in plan
        for placed in file.tensors
        if placed.mapped
    }


def _tell(facts: dict[str, Any]) -> None:
    out.print(f"version {facts['version']} (step {facts['step']}) is in {facts['directory']}", soft_wrap=True)
    for file in facts["files"]:
        out.print(f"  {file['name']}: {count(file['tensors'], 'tensor')}, {size(file['nbytes'])}", soft_wrap=True)
    out.print(f"  values.json: {count(facts['values'], 'plain value')}")
    mapped = list(facts["mapped"].items())
    for name, how in mapped[:_LISTED]:
        shape = " x ".join(str(n) for n in how["shape"])
        out.print(
            f"  note: safetensors has no {how['dtype']}: {printable(name)} is stored as {how['stored_as']}, {shape}",
            soft_wrap=True,
        )
    if len(mapped) > _LISTED:
        out.print(f"  note: {len(mapped) - _LISTED} more tensors are stored under another dtype; --json names them all")
