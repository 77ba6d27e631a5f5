"""``raystow import``: safetensors files as a version."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .present import count, emit, out, size
from .progress import byte_bar
from .target import Json, Uri

if TYPE_CHECKING:
    from ..shards import Shard
    from .safetensors_file import Listed


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A safetensors file, an index of several, or a folder.", show_default=False)
    ],
    uri: Uri,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The version's step; by default one more than the newest version's.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a version of safetensors files, as Hugging Face's tools and `raystow restore` write them.

    The repository is made if there is none. Not for one that a run writes to: this takes it over, and the run's next
    save fails.

    Example:  raystow import ./llama s3://bucket/runs/llama --step 0
    """
    from ...storage.clock import SYSTEM
    from ...storage.stores import open_store
    from ...workers.port import Ticket, coverage
    from ..direct.committing import Committing
    from ..direct.part import Storing, cores
    from .safetensors_source import find

    start, files = SYSTEM.monotonic(), find(source)
    tensors = [tensor for of in files.values() for tensor in of]
    total = sum(tensor.end - tensor.start for tensor in tensors)
    attempt = Committing(uri, step)
    ticket = Ticket(attempt.id, attempt.attempt, 0, _PATIENCE, attempt.step)
    storing = Storing(open_store(uri), ticket, memory=_MEMORY, threads=cores())
    with byte_bar(str(source), total, quiet=json) as advance, storing.under_way():
        for path, of in files.items():
            for tensor in of:
                storing.add(_shard(path, tensor))
                advance(tensor.end - tensor.start)
        part = storing.finish()
    expected = sum(coverage(t.name, t.dtype, t.shape, math.prod(t.shape)) for t in tensors)
    version = attempt.commit([part], expected, {})
    facts = {
        "uri": attempt.repository.uri,
        "version": version.id,
        "step": version.step,
        "files": [str(path) for path in files],
        "tensors": len(tensors),
        "nbytes": total,
        "stored": version.bytes,
        "seconds": round(SYSTEM.monotonic() - start, 3),
    }
    if json:
        emit(facts)
        return
    what = f"{count(len(tensors), 'tensor')}, {size(total)}, stored in {size(version.bytes)}"
    out.print(f"version {version.id} (step {version.step}): {what}", soft_wrap=True)


_MEMORY = 512 << 20  # bytes of chunks under way
_PATIENCE = 3600.0  # seconds that the store may take for what is left when all is read


def _shard(path: Path, tensor: Listed) -> Shard:
    """A tensor as it lies in its file; its bytes are read when they are coded."""
    import numpy as np

    from ...storage.coding import dtypes
    from ...storage.format import manifest
    from ..shards import Shard
    from ..state import Leaf

    item = f"V{dtypes.dtype(tensor.dtype).itemsize}"
    if tensor.end > tensor.start:
        raw = np.memmap(path, np.uint8, "r")[tensor.start : tensor.end].view(item).reshape(tensor.shape)
    else:
        raw = np.empty(tensor.shape, item)
    leaf, shape = Leaf((tensor.name,), tensor.name, None, True), tensor.shape
    return Shard(leaf, manifest.TENSOR, tensor.dtype, shape, (0,) * len(shape), shape, (), 0, raw)
