"""``raystow restore``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

from ..orchestrator.export import version_files
from ..orchestrator.export.output_dir import new_folder
from ..orchestrator.export.safetensors_file import files
from ..storage.real_paths import real_path
from ..storage.versions.version_selector import LATEST
from . import options
from .options import Json, Uri, Which
from .output import count, dimensions, emit, out, printable, size
from .progress import progress_bar
from .target import open_target

_LISTED = 10  # notes on single tensors; the others are counted


def restore(
    uri: Uri,
    output: Annotated[Path, options.folder("--output", "-o", help="New or empty folder.")],
    version: Which = LATEST,
    max_file_size: Annotated[int, options.size(help="Split a group's file between tensors above this size.")] = "5GiB",  # type: ignore[assignment]
    json: Json = False,
) -> None:
    """Write a version as safetensors files.

    One file per group (weights, optimizer), split into numbered files above 5 GiB, with an index for Hugging Face's tools; plain
    values go to values.json. All digests are checked. A failed or interrupted run leaves nothing. Dtypes that safetensors lacks
    are stored bit for bit as another dtype, which the output and the file's metadata (raystow.dtypes) name.

    Example:  raystow restore s3://bucket/runs/llama -o ./llama-final
    """
    target = open_target(uri)
    chosen = target.version(version)
    start = target.repository.clock.monotonic()
    with target.repository.lease(chosen):
        plan, values = files(chosen.tensors(), limit=max_file_size), version_files.plain_values(chosen)
        total = sum(file.nbytes for file in plan)
        with new_folder(output, total) as folder, progress_bar(f"version {chosen.id}", total, quiet=json) as advance:
            for file in plan:
                version_files.write_file(folder / file.name, file, chosen, advance)
            for _, parts in groupby(plan, key=lambda file: file.group):
                if len(split := list(parts)) > 1:
                    version_files.write_index(folder, split)
            version_files.write_json(folder / "values.json", values)
    directory, plain = str(real_path(output)), len(chosen.values())
    mapped = [placed for file in plan for placed in file.tensors if placed.mapped]
    if json:
        emit(
            {
                "uri": target.uri,
                "version": chosen.id,
                "step": chosen.step,
                "directory": directory,
                "files": [{"name": f.name, "group": f.group, "tensors": len(f.tensors), "nbytes": f.nbytes} for f in plan],
                "values": plain,
                "mapped": {p.name: {"dtype": p.info.dtype, "stored_as": p.form, "shape": p.shape} for p in mapped},
                "seconds": round(target.repository.clock.monotonic() - start, 3),
            }
        )
        return
    out.print(f"version {chosen.id} (step {chosen.step}) is in {directory}")
    for file in plan:
        out.print(f"  {file.name}: {count(len(file.tensors), 'tensor')}, {size(file.nbytes)}")
    out.print(f"  values.json: {count(plain, 'plain value')}")
    for placed in mapped[:_LISTED]:
        what = f"safetensors has no {placed.info.dtype}: {printable(placed.name)} is stored as {placed.form}"
        out.print(f"  note: {what}, {dimensions(placed.shape)}")
    if len(mapped) > _LISTED:
        out.print(f"  note: {len(mapped) - _LISTED} more tensors are stored as another dtype; --json names all of them")
