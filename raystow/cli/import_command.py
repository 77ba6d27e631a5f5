"""``raystow import``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ..orchestrator.export.safetensors_file import SourceTensor, header_size, source_tensors
from ..orchestrator.standalone.commit import StandaloneCommit
from ..orchestrator.standalone.writer import StandaloneWriter, cores
from ..state.coverage import coverage, total
from ..state.shards import Shard
from ..state.tree import Leaf
from ..storage.arguments import integer
from ..storage.coding import dtypes
from ..storage.errors import StateError
from ..storage.format import manifest
from ..storage.format.json_text import strict_json
from ..storage.real_paths import input_path, regular_file, small_file
from ..storage.runtime.clock import SYSTEM
from ..storage.stores import open_store
from .options import Json, Uri, local, number
from .output import count, emit, out, size
from .progress import progress_bar

MEMORY = 512 << 20  # bytes of chunks in progress
_TIMEOUT = 3600.0  # seconds for the uploads that remain once everything is read
_INDEX = ".safetensors.index.json"


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", parser=local, help="Safetensors file, index of several, or folder.")
    ],
    uri: Uri,
    step: Annotated[int | None, number(min=0, help="Step of the version; by default the newest version's plus one.")] = None,
    json: Json = False,
) -> None:
    """Store safetensors files as a new version.

    Reads files of Hugging Face's tools and `raystow restore`, without values.json; names and bytes are kept. The repository is
    created if it does not exist. If a job saves to the repository, its next save fails with Fenced. Invalid files are refused
    before anything is written.

    Example:  raystow import ./llama s3://bucket/runs/llama --step 0
    """
    if step is not None:
        integer("--step", step, least=0)
    start, files = SYSTEM.monotonic(), find_tensors(source)
    tensors = [tensor for of in files.values() for tensor in of]
    nbytes = sum(tensor.end - tensor.start for tensor in tensors)
    attempt = StandaloneCommit(uri, step)
    ticket = attempt.ticket(0, _TIMEOUT)
    storing = StandaloneWriter(open_store(uri), ticket, memory=MEMORY, threads=cores())
    with progress_bar(str(source), nbytes, quiet=json) as advance, storing.under_way():
        for path, of in files.items():
            for tensor in of:
                storing.add(_shard(path, tensor))
                advance(tensor.end - tensor.start)
        storing.seal()
        part = storing.finish([])
    expected = total(coverage(t.name, t.dtype, t.shape) for t in tensors)
    version = attempt.commit([part], expected, {})
    if json:
        emit(
            {
                "uri": attempt.repository.uri,
                "version": version.id,
                "step": version.step,
                "files": [str(path) for path in files],
                "tensors": len(tensors),
                "nbytes": nbytes,
                "stored": version.bytes,
                "seconds": round(SYSTEM.monotonic() - start, 3),
            }
        )
        return
    what = f"{count(len(tensors), 'tensor')}, {size(nbytes)}, stored in {size(version.bytes)}"
    out.print(f"version {version.id} (step {version.step}): {what}")


def find_tensors(source: Path) -> dict[Path, list[SourceTensor]]:
    """Return the tensors of each file: ``source`` itself, the files of an index, or all files of a folder.

    Raises:
        StateError: there is no file, a link leads out of the folder, a name occurs twice, or an index does not match its files.
    """
    indices = sorted(source.glob(f"*{_INDEX}")) if source.is_dir() else [source] if source.name.endswith(_INDEX) else []
    for path in set(indices) - {source}:
        input_path(source, path.name)
    maps = [_weight_map(index) for index in indices]
    if source.is_dir():
        paths = sorted(source.glob("*.safetensors"))
    else:
        paths = sorted({source.parent / name for of in maps for name in of.values()}) if maps else [source]
    for path in set(paths) - {source}:
        input_path(path.parent, path.name)
    if not paths:
        raise StateError(
            "there is no safetensors file", subject=str(source), remedy="give a folder that contains some, or a file"
        )
    files = {path: _tensors(path) for path in paths}
    file_of: dict[str, str] = {}
    for path, tensors in files.items():
        for tensor in tensors:
            if tensor.name in file_of:
                what = f"{file_of[tensor.name]} and {path.name} both have a tensor {tensor.name!r}"
                raise StateError(what, subject=str(source), remedy="give one file, or an index")
            file_of[tensor.name] = path.name
    lost = [name for of in maps for name, file in of.items() if file_of.get(name) != file]
    if lost:
        what = f"{count(len(lost), 'tensor')} not in the file that the index names, {lost[0]!r} first"
        raise StateError(what, subject=str(source))
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """The tensors of an index, each with the name of a file in the same folder."""
    try:
        found = strict_json(small_file(index).decode())["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in found.values()):
            return {str(name): file for name, file in found.items()}
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        pass
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}", subject=str(index)) from error
    raise StateError("is not an index of safetensors files", subject=str(index))


def _tensors(path: Path) -> list[SourceTensor]:
    try:
        with regular_file(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            header = file.read(header_size(file.read(8), nbytes))
        return source_tensors(header, nbytes)
    except StateError as error:
        raise StateError(error.what, subject=str(path), remedy=error.remedy) from error
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}", subject=str(path)) from error


def _shard(path: Path, tensor: SourceTensor) -> Shard:
    """A tensor as it is in its file; its bytes are read when they are coded."""
    item = f"V{dtypes.dtype(tensor.dtype).itemsize}"
    if tensor.end > tensor.start:
        raw = np.memmap(path, np.uint8, "r")[tensor.start : tensor.end].view(item).reshape(tensor.shape)
    else:
        raw = np.empty(tensor.shape, item)
    leaf, shape = Leaf((tensor.name,), tensor.name, None, True), tensor.shape
    return Shard(leaf, manifest.TENSOR, tensor.dtype, shape, (0,) * len(shape), shape, (), raw)
