"""Writes a version as files: safetensors, an index for those that were split, and the plain values as JSON.

Memory is bounded by one slab and the reader's buffers, whatever the size of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import StateError
from ...storage.format import values
from ...storage.format.rank_spans import RankSet
from ...storage.object_store import Buffer
from ...storage.versions.version import Version
from .output_folder import FilePlan, WriteFile
from .safetensors_file import SafetensorsFile
from .slabs import TensorBox, boxes_of, read_slab, slabs

SLAB = 128 << 20
"""Bytes that are decoded into memory before they are written."""


def file_plan(version: Version, files: Sequence[SafetensorsFile], others: Iterable[str]) -> FilePlan:
    """Return what is known of the files before they are written.

    Args:
        version: The version to read.
        files: The files of tensors.
        others: The names of the other files.
    """
    headers = [(file.name, file.nbytes, stored_digest(file.header({})).hex()) for file in files]
    weights, names = {file.name: len(_header(file, version)) + file.nbytes for file in files}, tuple(others)
    content = [version.repository_id, _origin(version), version.record.bits, headers, sorted(names)]
    return FilePlan(stored_digest(json.dumps(content).encode()).hex(), weights, names, f"{version.repository_id}/{version.id}")


def write_file(
    write: WriteFile,
    file: SafetensorsFile,
    version: Version,
    progress: Callable[[int], None],
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write one safetensors file, slab by slab; numbers that were saved in another dtype than the file's are converted.

    Args:
        write: Creates the file.
        file: Its layout.
        version: The version to read.
        progress: Is called with the decoded bytes of each chunk.
        names: The version's name of each of the file's; by default the same.

    Raises:
        StateError: A number is too large for the dtype of the file.
    """
    header = _header(file, version)

    def content() -> Iterator[Buffer]:
        yield header
        reader, buffer = version.reader(), np.empty(SLAB, np.uint8)
        targets = {names.get(tensor.name, tensor.name): tensor.info for tensor in file.tensors}
        for slab in slabs(boxes_of([version], targets, SLAB // 2), SLAB):
            read_slab(reader, slab, buffer, progress)
            end = 0
            for box in slab:
                start, end = end, end + box.nbytes
                yield _converted(buffer[start:end], box, targets[box.name].dtype).data

    write(file.name, len(header) + file.nbytes, content)


def _header(file: SafetensorsFile, version: Version) -> bytes:
    """The header. It names the version as it was saved, for ``finished_export``: it may be written again after its export."""
    return file.header({f"raystow.{name}": value for name, value in _origin(version).items()})


def _origin(version: Version) -> dict[str, str]:
    return {"version": str(version.id), "step": str(version.step), "attempt": version.entry.origin}


def _converted(raw: Bytes, box: TensorBox, dtype: str) -> Bytes:
    if box.dtype == dtype:
        return raw
    numbers = raw.view(dtypes.to_numpy(box.dtype))
    with np.errstate(over="ignore"):  # ml_dtypes does not report it, so the result is checked
        converted = numbers.astype(dtypes.to_numpy(dtype))
    infinite = np.isinf(converted)
    if infinite.any() and np.isfinite(numbers[infinite]).any():
        raise StateError(f"has a number too large for {dtype}", subject=box.name, remedy="choose another --dtype")
    return converted.view(np.uint8)


def index_name(parts: Sequence[SafetensorsFile]) -> str:
    """Return the name of the index of a group in several files."""
    return f"{parts[0].group}.safetensors.index.json"


def write_index(write: WriteFile, parts: Sequence[SafetensorsFile]) -> None:
    """Write ``<group>.safetensors.index.json`` for a group in several files, as Hugging Face's tools read it."""
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in parts)},
        "weight_map": {placed.name: file.name for file in parts for placed in file.tensors},
    }
    write_json(write, index_name(parts), index)


def plain_values(version: Version) -> dict[str, object]:
    """Return the content of ``values.json``: ``values`` of rank 0, and ``by_rank`` those that differ between ranks."""
    by_rank = {
        name: [{"ranks": [*ranks], "value": json.loads(text)} for text, ranks in found.items()]
        for name, found in value_texts(version).items()
        if len(found) > 1
    }
    return {
        "version": version.id,
        "step": version.step,
        "created": version.created,
        "metrics": {name: values.encode(value) for name, value in version.metrics.items()},
        "values": {name: values.encode(value) for name, value in version.values().items()},
        "by_rank": by_rank,
    }


def value_texts(version: Version) -> dict[str, dict[str, RankSet]]:
    """Return for each plain value its encoded texts, and for each text the ranks that saved it."""
    found: dict[str, dict[str, RankSet]] = {}
    for fragment in version.manifest.select({}):
        for row in fragment.values:
            found.setdefault(row.name, {}).setdefault(row.text, RankSet()).add(row.ranks)
    return found


def write_json(write: WriteFile, name: str, content: object) -> None:
    """Write a JSON file."""
    text = json.dumps(content, indent=1, allow_nan=False).encode()
    write(name, len(text), lambda: [text])
