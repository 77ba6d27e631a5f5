"""Describes a version to DCP: its keys, the chunks of each tensor, and the assembled plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import ReadItem

from ...state.tree import Path
from ...state.wrapper_tensors import DESCRIPTION
from ...storage.errors import Damaged, RaystowError, StateError, Unsupported
from ...storage.format import manifest, values
from ...storage.format.boxes import Box, tile
from ...storage.format.manifest import Chunk, Value
from ...storage.versions.version import Version
from .keys import KeyLeaf, assemble, keys_of


class UnreadMetadata(dcp_metadata.Metadata):  # type: ignore[misc]  # torch is not typed here
    """Stands for metadata that could not be read. Raises the error when it is used, because DCP replaces an error of
    ``read_metadata`` by an ``AssertionError``."""

    def __init__(self, error: RaystowError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> object:
        """Raise the error."""
        raise self.error


class KeyMetadata(dict[str, "dcp_metadata.STORAGE_TYPES"]):
    """The metadata of each key. Keys of the outermost dict are found too, but not listed: planners with
    ``flatten_state_dict=False`` ask for them. So are those of tensors that consist of others."""

    def __init__(self, of_keys: Mapping[str, dcp_metadata.STORAGE_TYPES], outermost: Collection[str]) -> None:
        super().__init__(of_keys)
        self._outermost = outermost

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._outermost

    def __missing__(self, key: str) -> dcp_metadata.STORAGE_TYPES:
        if key in self._outermost:
            return dcp_metadata.BytesStorageMetadata()
        raise KeyError(key)


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
        self._outermost: dict[str, list[tuple[str, Path]]] = {}
        for leaf in leaves:
            self._outermost.setdefault(str(leaf.path[0]), []).append((leaf.name, leaf.path[1:]))
        described = [leaf.path[:-1] for leaf in leaves if leaf.path[-1:] == (DESCRIPTION,)]
        self._wrappers = {".".join(str(part[1] if isinstance(part, tuple) else part) for part in path) for path in described}

    def metadata(self) -> dcp_metadata.Metadata:
        """Return the metadata from which DCP plans a load."""
        found: dict[str, dcp_metadata.TensorStorageMetadata | dcp_metadata.BytesStorageMetadata] = {}
        for name, key in self._keys.items():
            rows = self._version.chunks.get(name)
            single = key.parts == [(name, ())] and rows is not None and rows[0].kind == manifest.TENSOR
            found[name] = _tensor(rows) if single and rows is not None else dcp_metadata.BytesStorageMetadata()
        of_keys = KeyMetadata(found, self._outermost.keys() | self._wrappers)
        return dcp_metadata.Metadata(of_keys, planner_data={name: key.path for name, key in self._keys.items()})

    def box(self, item: ReadItem) -> tuple[Chunk, Box]:
        """Return the chunk that DCP reads from, and the box to read in the coordinates of the tensor."""
        chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        offset = tuple(a + b for a, b in zip(chunk.offset, item.storage_offsets, strict=True))
        return chunk, (offset, tuple(item.lengths))

    def is_flattened(self, key: str) -> bool:
        """Whether DCP's planners split this key into several, unless ``flatten_state_dict=False``."""
        return key not in self._keys

    def array(self, key: str) -> list[Chunk] | None:
        """Return the chunks of a key that DCP treats as a value, but that is one tensor or array; None if it is not."""
        parts = self._keys[key].parts if key in self._keys else self._outermost[key]
        (name, path), *others = parts
        return self._version.chunks.get(name) if not path and not others else None

    def value(self, key: str, rank: int) -> object:
        """Return a value as ``rank`` saved it; if that rank had none of this name, as the lowest rank that had one."""
        parts = self._keys[key].parts if key in self._keys else self._outermost[key]
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
