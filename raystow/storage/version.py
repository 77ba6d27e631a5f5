"""A committed version, as its readers see it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from .arguments import integer
from .bases import Bases
from .chains import needed
from .clock import SYSTEM
from .coding import dtypes
from .coding.digest import stored_digest
from .coding.rounded import Rounded
from .errors import Damaged, NotFound, StateError, Unsupported
from .finder import Finder, Seeker
from .format import key_files, keys, manifest, values
from .format.boxes import Box
from .format.manifest import Chunk, Fragment
from .format.root import Entry, Register
from .format.selection import select
from .format.signing import Trust
from .format.version_record import FragmentInfo, VersionRecord
from .limits import MAX_FRAGMENT, MAX_RECORD
from .object_store import ObjectStore
from .reader import Reader, Request

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a version: global ``shape``, ``dtype`` by torch's name, ``nbytes`` raw and ``stored`` bytes in packs,
    ``kind`` (``tensor``, ``array`` or ``scalar``) and the ``group`` of packs that holds it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stored: int
    kind: str
    group: str


class Version:
    """One committed version. Immutable; its manifest is read, and checked against the root's digest, when first needed.

    ``trust``: who must have signed it; by default whom this process's environment trusts when the record is read. ``beside``:
    those that the root had when this one was found there: what it is a difference to can be read until it is collected.
    """

    def __init__(
        self, store: ObjectStore, entry: Entry, repository: str, trust: Trust | None = None, beside: Sequence[Entry] = ()
    ) -> None:
        self._store, self.entry, self._repository, self._trust, self.beside = store, entry, repository, trust, beside
        self.id, self.step, self.created = entry.id, entry.step, entry.created
        self.raw, self.bytes = entry.raw, entry.stored
        self._boxes: dict[int, dict[tuple[str, Box], Chunk]] = {}  # by fragment

    def __repr__(self) -> str:
        return f"Version(id={self.id}, step={self.step}, bytes={self.bytes}, uri={self._store.uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and (self._repository, self.entry) == (other._repository, other.entry)

    def __hash__(self) -> int:
        return hash((self._repository, self.entry))

    def __reduce__(self) -> tuple[Any, ...]:
        users = needed(self.beside, [self.id])
        beside = tuple(entry for entry in self.beside if entry.id in users)
        return Version, (self._store, self.entry, self._repository, self._trust, beside)

    @property
    def attempt(self) -> str:
        """The attempt that became this version; part of its objects' keys."""
        return self.entry.attempt

    @property
    def record_key(self) -> str:
        """Where its record lies."""
        return keys.record(self.id, self.attempt)

    @functools.cached_property
    def record(self) -> VersionRecord:
        """The version record, checked against the digest in the root and, with trusted keys, for a signature: else ``Untrusted``.

        Everything else that a version tells of itself, but for what the root's entry says, goes through here.
        """
        key = self.record_key
        data = self._checked(key, self.entry.size, self.entry.digest, MAX_RECORD)
        trust = self._trust or key_files.trust() or Trust()
        trust.check(self._store, self._repository, self.id, self.attempt, bytes.fromhex(self.entry.digest))
        record = VersionRecord.load(data, key)
        if (record.repository, record.id, record.attempt) != (self._repository, self.id, self.attempt):
            raise Damaged("the record belongs to another version", subject=key)
        if (record.step, record.created) != (self.step, self.created):  # the root is signed by nobody
            raise Damaged(f"the root says step {self.step}, the record {record.step}", subject=key)
        return record

    @property
    def resumable(self) -> bool:
        """Whether it holds all that was saved; False once it was thinned."""
        return self.entry.resumable

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics given to ``save``."""
        return self.record.metrics

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return self.record.world_size

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The manifest, each fragment checked against its digest in the record."""
        return tuple(Fragment.load(*self._fragment(info)) for info in self.record.fragments)

    @functools.cached_property
    def bases(self) -> Bases:
        """The versions that chunks of this one are differences to."""
        return Bases(self, self.sibling)

    def sibling(self, id: int) -> Version | None:
        """Another version of the repository, where the root says that it lies now; or where it lay when this one was found, if
        the root does not hold it any more, or this one: what this one needs may have been thinned when it was itself."""
        entries = Register(self._store, SYSTEM, repository=self._repository).read().versions
        places = (*entries, *self.beside) if self.entry in entries else (*self.beside, *entries)
        found = (entry for entry in places if entry.id == id)
        return next((Version(self._store, entry, self._repository, self._trust) for entry in found), None)

    def chunk(self, name: str, box: Box, *, near: int) -> Chunk | None:
        """The chunk of a tensor that has just this box; ``near``: the node in whose fragment it should stand."""
        for info in sorted(self.record.fragments, key=lambda info: info.node != near):
            if info.node not in self._boxes:
                chunks = Fragment.load(*self._fragment(info)).chunks
                self._boxes[info.node] = {(chunk.name, chunk.box): chunk for chunk in chunks}
            if (found := self._boxes[info.node].get((name, box))) is not None:
                return found
        return None

    def finder(self, seeker: Seeker) -> Finder:
        """Finds the rows of the manifest that a rank needs, with as little of the manifest read as will do."""
        return Finder(self.record.fragments, lambda info, of: select(*self._fragment(info), of), seeker)

    def _fragment(self, info: FragmentInfo) -> tuple[bytes, int, str]:
        key = keys.fragment(self.id, self.attempt, info.node)
        return self._checked(key, info.size, info.digest, MAX_FRAGMENT), info.node, key

    @functools.cached_property
    def chunks(self) -> dict[str, list[Chunk]]:
        """The manifest's chunk rows by tensor name."""
        rows: dict[str, list[Chunk]] = {}
        for fragment in self.fragments:
            for chunk in fragment.chunks:
                same = rows.setdefault(chunk.name, [])
                if same and (same[0].shape, same[0].dtype, same[0].kind) != (chunk.shape, chunk.dtype, chunk.kind):
                    raise Damaged(f"rows of {chunk.name!r} disagree on shape, dtype or kind", subject=repr(self))
                same.append(chunk)
        for name, same in rows.items():
            self._check_covered(name, same)
        return rows

    def _check_covered(self, name: str, rows: Sequence[Chunk]) -> None:
        """Also what keeps an absurd shape from being allocated."""
        held, size = sum(math.prod(chunk.extent) for chunk in rows), math.prod(rows[0].shape)
        if held != size:
            raise Damaged(f"the manifest covers {held} of {size} elements of {name!r}", subject=repr(self))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, array and numpy scalar by name."""
        infos = {}
        for name, rows in sorted(self.chunks.items()):
            first = rows[0]
            nbytes = math.prod(first.shape) * dtypes.dtype(first.dtype).itemsize
            stored = sum(row.stored for row in rows)
            infos[name] = TensorInfo(first.shape, first.dtype, nbytes, stored, first.kind, first.group)
        return infos

    def rounded(self) -> Mapping[str, Rounded]:
        """What rounding has done to the tensors of which not every bit was kept, by name; see ``docs/compression.md``."""
        found: dict[str, Rounded] = {}
        for fragment in self.fragments:
            for name, one in fragment.rounded.items():
                found[name] = found[name] | one if name in found else one
        return dict(sorted(found.items()))

    def values(self, rank: int = 0) -> dict[str, Any]:
        """Every plain value by name, as ``rank`` saved it; a rank that the save did not have sees those of the lowest rank that
        has each. ``StateError`` for a number that is no rank."""
        integer("rank", rank, least=0)
        return {row.name: values.loads(row.text) for row in self.value_rows(rank)}

    def value_rows(self, rank: int) -> Iterator[manifest.Value]:
        """The value rows that ``values(rank)`` decodes."""
        rows = [row for fragment in self.fragments for row in fragment.values]
        if rank < self.world_size:
            yield from (row for row in rows if rank in row.ranks)
            return
        rows.sort(key=lambda row: min(row.ranks), reverse=True)
        yield from {row.name: row for row in rows}.values()

    def read(self, name: str, index: Index | None = None) -> Any:
        """One tensor, or the part of it that ``index`` (integers, slices with positive steps, ``...``) selects.

        A torch tensor on the CPU where torch is installed, else a numpy array (bfloat16 and fp8 through ml_dtypes); what was
        saved as a numpy array or scalar, or as a plain value, comes back as such. Reads only the chunks that overlap.
        """
        rows = self.chunks.get(name)
        if rows is None:
            plain = self.values(self.world_size)
            if name in plain:
                return plain[name]
            raise StateError(f"version {self.id} holds no tensor or value {name!r}", remedy="tensors() lists the names")
        return self.assemble(name, rows, index)

    def assemble(self, name: str, rows: Sequence[Chunk], index: Index | None = None) -> Any:
        """What ``read`` gives, of a tensor whose rows are known."""
        self._check_covered(name, rows)
        first = rows[0]
        offset, extent, rest = _resolve(index, first.shape, name)
        raw = np.empty(extent, np.dtype(f"V{dtypes.dtype(first.dtype).itemsize}"))
        self.reader().fill([Request(name, rows, (offset, extent), raw)])
        if first.kind == manifest.TENSOR:
            tensor = _as_torch(raw, first.dtype)
            if tensor is not None:
                return tensor[rest]
        array = raw.view(dtypes.to_numpy(first.dtype))
        array = array[rest] if rest else array
        return array[()] if first.kind == manifest.SCALAR else array

    def reader(self, *, threads: int | None = None, turn: float = 0.0) -> Reader:
        """A reader of this version's packs; see there."""
        return Reader(self._store, self.id, self.attempt, base=self.bases.run, threads=threads, turn=turn)

    def _checked(self, key: str, size: int, digest: str, limit: int) -> bytes:
        if size > limit:
            raise Damaged(f"claims {size} bytes, more than the format allows", subject=key)
        for _ in range(2):  # bytes that were changed on their way are right the second time
            try:
                data = self._store.get(key, max_bytes=size)
            except NotFound:
                raise Damaged("the object is missing", subject=key) from None
            if len(data) == size and stored_digest(data).hex() == digest:
                return data
        raise Damaged("the object does not match its digest", subject=key)


def _as_torch(raw: Any, name: str) -> Any:
    try:
        import torch
    except ImportError:
        return None
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise Unsupported(f"torch {torch.__version__} has no {name}", subject=name, remedy="upgrade torch")
    if raw.size == 0:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(raw.reshape(-1).view(np.uint8), dtype=torch.uint8).view(dtype).reshape(raw.shape)


def _resolve(index: Index | None, shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """The smallest box that holds what ``index`` selects, and the index to apply to it."""
    parts: list[Any] = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    if any(type(p) is not int and not isinstance(p, slice | EllipsisType | np.integer) for p in parts):
        raise StateError("an index is made of integers, slices and '...'", subject=name)
    if parts.count(...) > 1 or len(parts) - parts.count(...) > len(shape):
        raise StateError(f"index {index!r} does not fit shape {shape}", subject=name)
    where = parts.index(...) if ... in parts else len(parts)
    missing = len(shape) - (len(parts) - parts.count(...))
    parts[where : where + 1] = [slice(None)] * missing
    offset: list[int] = []
    extent: list[int] = []
    rest: list[int | slice] = []
    for part, size in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            try:
                start, stop, step = part.indices(size)
            except (TypeError, ValueError) as error:
                raise StateError(f"{part!r} is not a slice of integers: {error}", subject=name) from error
            if step < 1:
                raise StateError("steps must be positive", subject=name)
            offset.append(start)
            extent.append(max(0, stop - start))
            rest.append(slice(None, None, step))
        else:
            at = int(part) + size if part < 0 else int(part)
            if not 0 <= at < size:
                raise StateError(f"index {part} is out of range for size {size}", subject=name)
            offset.append(at)
            extent.append(1)
            rest.append(0)
    return tuple(offset), tuple(extent), tuple(rest)
