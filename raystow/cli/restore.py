"""``raystow restore``."""

from __future__ import annotations

from typing import Annotated

from ..orchestrator.export.destination import Destination
from ..orchestrator.export.version_folder import plan_version_folder
from ..storage.versions.version_selector import LATEST
from . import options
from .options import Json, Uri, Which
from .output import count, dimensions, emit, out, printable, size
from .progress import progress_bar
from .target import open_target

_LISTED = 10  # notes on single tensors; the others are counted


def restore(
    uri: Uri,
    output: Annotated[Destination, options.place("--output", "-o", help="New or empty folder; or s3://, gs://, az://.")],
    version: Which = LATEST,
    max_file_size: Annotated[int, options.size(help="Split a group's file between tensors above this size.")] = "5GiB",  # type: ignore[assignment]
    json: Json = False,
) -> None:
    """Write a version as safetensors files.

    One file per group (weights, optimizer), split into numbered files above 5 GiB, with an index for Hugging Face's tools; plain
    values go to values.json. All digests are checked. A failed or interrupted run leaves no folder; to an object store, the same
    command continues it. Dtypes that safetensors lacks are stored bit for bit as another dtype, which the output and the file's
    metadata (raystow.dtypes) name.

    Example:  raystow restore s3://bucket/runs/llama -o ./llama-final
    """
    target = open_target(uri)
    chosen = target.version(version)
    start = target.repository.clock.monotonic()
    with target.repository.lease(chosen):
        plan = plan_version_folder(chosen, limit=max_file_size)
        with output.new(plan.plan) as folder, progress_bar(f"version {chosen.id}", plan.raw, quiet=json) as advance:
            plan.write(folder, advance)
    directory, plain = output.shown, chosen.contents.values
    mapped = [placed for file in plan.files for placed in file.tensors if placed.mapped]
    if json:
        emit(
            {
                "uri": target.uri,
                "version": chosen.id,
                "step": chosen.step,
                "directory": directory,
                "files": [{"name": f.name, "group": f.group, "tensors": len(f.tensors), "nbytes": f.nbytes} for f in plan.files],
                "values": plain,
                "mapped": {p.name: {"dtype": p.info.dtype, "stored_as": p.form, "shape": p.shape} for p in mapped},
                "seconds": round(target.repository.clock.monotonic() - start, 3),
            }
        )
        return
    out.print(f"version {chosen.id} (step {chosen.step}) is in {directory}")
    for file in plan.files:
        out.print(f"  {file.name}: {count(len(file.tensors), 'tensor')}, {size(file.nbytes)}")
    out.print(f"  values.json: {count(plain, 'plain value')}")
    for placed in mapped[:_LISTED]:
        what = f"safetensors has no {placed.info.dtype}: {printable(placed.name)} is stored as {placed.form}"
        out.print(f"  note: {what}, {dimensions(placed.shape)}")
    if len(mapped) > _LISTED:
        out.print(f"  note: {len(mapped) - _LISTED} more tensors are stored as another dtype; --json names all of them")
