"""Describes a version to DCP: its keys, the chunks of each tensor, and the assembled plain values."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import ReadItem

from ....storage.errors import Damaged, StateError, Unsupported
from ....storage.format import manifest, values
from ....storage.format.boxes import Box, tile
from ....storage.format.manifest import Chunk, Value
from ....storage.version import Version
from .keys import KeyLeaf, assemble, keys_of


class VersionMetadata:
    """The keys of a version. Reads the manifest; raises ``Damaged`` if it is invalid."""

    def __init__(self, version: Version) -> None:
        self._version = version
        self._chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for name, rows in version.chunks.items():
            if not tile([row.box for row in rows], ((0,) * len(rows[0].shape), rows[0].shape)):
                raise Damaged(f"the chunks of {name!r} do not contain each element once", subject=repr(version))
            self._chunks.update({(name, row.offset): row for row in rows})
        self._values: dict[str, list[Value]] = {}
        for fragment in version.fragments:
            for row in fragment.values:
                self._values.setdefault(row.name, []).append(row)
        leaves = [
            KeyLeaf(name, manifest.parse_path(of[0].path), of[0].kind == manifest.TENSOR) for name, of in version.chunks.items()
        ]
        for name, (first, *_) in self._values.items():
            leaves.append(KeyLeaf(name, manifest.parse_path(first.path), is_nothing=values.loads(first.text) == {}))
        self._keys = keys_of(leaves)

    def metadata(self) -> dcp_metadata.Metadata:
        """Return the metadata from which DCP plans a load."""
        found: dict[str, dcp_metadata.TensorStorageMetadata | dcp_metadata.BytesStorageMetadata] = {}
        for name, key in self._keys.items():
            rows = self._version.chunks.get(name)
            single = key.parts == [(name, ())] and rows is not None and rows[0].kind == manifest.TENSOR
            found[name] = _tensor(rows) if single and rows is not None else dcp_metadata.BytesStorageMetadata()
        return dcp_metadata.Metadata(found, planner_data={name: key.path for name, key in self._keys.items()})

    def box(self, item: ReadItem) -> tuple[Chunk, Box]:
        """Return the chunk that DCP reads from, and the box to read in the coordinates of the tensor."""
        chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        offset = tuple(a + b for a, b in zip(chunk.offset, item.storage_offsets, strict=True))
        return chunk, (offset, tuple(item.lengths))

    def value(self, key: str, rank: int) -> object:
        """Return a value as ``rank`` saved it; if that rank had none of this name, as the lowest rank that had one."""
        parts = self._keys[key].parts
        holders = {holder for name, _ in parts for row in self._values.get(name, ()) for holder in row.ranks}
        source = rank if rank in holders else min(holders, default=0)
        found = []
        for name, path in parts:
            if name in self._version.chunks:
                found.append((path, self._version.assemble(name, self._version.chunks[name])))
            found += [(path, values.loads(row.text)) for row in self._values.get(name, ()) if source in row.ranks]
        if not found:
            raise StateError(f"version {self._version.id} has nothing of this name", subject=key)
        return assemble(found)


def _tensor(rows: list[Chunk]) -> dcp_metadata.TensorStorageMetadata:
    dtype = getattr(torch, rows[0].dtype, None)
    if dtype is None:
        raise Unsupported(f"torch {torch.__version__} has no {rows[0].dtype}", subject=rows[0].name, remedy="upgrade torch")
    chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size(row.offset), torch.Size(row.extent)) for row in rows]
    return dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(dtype=dtype), torch.Size(rows[0].shape), chunks)
