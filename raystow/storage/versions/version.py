"""A committed version, as its readers see it."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from ..arguments import integer, refused
from ..coding import dtypes
from ..coding.derived import Derivation
from ..coding.digest import stored_digest
from ..coding.rounded import Rounded
from ..errors import Damaged, NotFound, StateError
from ..format import key_files, keys, values
from ..format.boxes import Box
from ..format.manifest import SCALAR, TENSOR, Chunk, Fragment, Value, parse_path
from ..format.parts import part_of
from ..format.rank_parts import rank_of
from ..format.root import Entry
from ..format.selection import Sought
from ..format.signature import Trust
from ..format.version_record import FragmentInfo, PackInfo, VersionRecord
from ..limits import MAX_CHAIN, MAX_RECORD
from ..notebook import facts_table, moment, size
from ..object_store import ObjectStore
from ..root.delta_chain import needed
from ..root.root_register import RootRegister
from ..runtime.clock import SYSTEM
from .contents import Contents, contents
from .reader import PackReader, Request
from .runs import ByteRun
from .stored_manifest import StoredManifest
from .tensor_index import Finder, Seeker
from .tensor_slice import Index, resolved
from .torch_tensor import as_torch
from .value_tree import Path, beneath, nested


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, array or numpy scalar of a version.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype by torch's name.
        nbytes: Bytes of its elements.
        stored: Bytes in packs.
        kind: ``tensor``, ``array`` or ``scalar``.
        group: The group of packs that stores it.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stored: int
    kind: str
    group: str


class Version:
    """A committed version. It never changes.

    The manifest is read at first use and checked against the digest in the root.

    Attributes:
        id: The id; later versions have higher ones.
        step: The training step.
        created: Seconds since 1970.
        raw: Bytes of all tensors.
        bytes: Stored bytes.
    """

    # ``trust``: the signatures that are required. ``siblings``: the entries of the root in which this version was found; its
    # bases are among them, and can be read until they are collected.
    def __init__(
        self, store: ObjectStore, entry: Entry, repository: str, trust: Trust | None = None, siblings: Sequence[Entry] = ()
    ) -> None:
        self.store, self.entry, self.repository_id, self.trust, self.siblings = store, entry, repository, trust, siblings
        self.id, self.step, self.created = entry.id, entry.step, entry.created
        self.raw, self.bytes = entry.raw, entry.stored

    def __repr__(self) -> str:
        return f"Version(id={self.id}, step={self.step}, bytes={self.bytes}, uri={self.store.uri!r})"

    def _repr_html_(self) -> str:
        facts = {
            "repository": self.store.uri,
            "step": self.step,
            "created": moment(self.created),
            "raw": size(self.raw),
            "stored": f"{size(self.bytes)} ({self.bytes / self.raw:.3f})" if self.raw else size(self.bytes),
            "needs": ", ".join(f"version {id}" for id in self.entry.bases),
            "groups": ", ".join(self.entry.groups),
        }
        return facts_table(f"version {self.id}", facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and (self.repository_id, self.entry) == (other.repository_id, other.entry)

    def __hash__(self) -> int:
        return hash((self.repository_id, self.entry))

    def __reduce__(self) -> tuple[object, ...]:
        users = needed(self.siblings, [self.id])
        siblings = tuple(entry for entry in self.siblings if entry.id in users)
        return Version, (self.store, self.entry, self.repository_id, self.trust, siblings)

    @property
    def attempt(self) -> str:
        """The attempt that became this version; part of its objects' keys."""
        return self.entry.attempt

    @property
    def record_key(self) -> str:
        """The key of its record."""
        return keys.record(self.id, self.attempt)

    @functools.cached_property
    def record(self) -> VersionRecord:
        """The version record, checked against the digest in the root and, with trusted keys, for a signature: else ``Untrusted``.
        Everything that is known of a version beyond its entry in the root is read through this property."""
        key, data = self.record_key, self.record_bytes()
        trust = self.trust or key_files.trust() or Trust()
        trust.check(self.store, self.repository_id, self.id, self.attempt, bytes.fromhex(self.entry.digest))
        record = VersionRecord.load(data, key)
        if (record.repository, record.id, record.attempt) != (self.repository_id, self.id, self.attempt):
            raise Damaged("the record belongs to another version", subject=key)
        if (record.step, record.created) != (self.step, self.created):  # the root is not signed
            raise Damaged(f"the root says step {self.step}, the record {record.step}", subject=key)
        return record

    def record_bytes(self) -> bytes:
        """The bytes of the record, checked against the digest in the root only."""
        return self._checked(self.record_key, self.entry.size, self.entry.digest, MAX_RECORD)

    def fragment_bytes(self, info: FragmentInfo) -> bytes:
        """The bytes of a fragment of the record, checked against their digest."""
        return self.manifest.data(info)

    @property
    def resumable(self) -> bool:
        """Whether the version has all that was saved; False once it is thinned."""
        return self.entry.resumable

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics given to ``save``."""
        return self.record.metrics

    @property
    def provenance(self) -> dict[str, str]:
        """Where the version comes from: command line, git commit, packages, hosts, the version resumed from. May be empty."""
        return self.record.provenance

    @property
    def notes(self) -> dict[str, Any]:
        """The notes given to ``Checkpointer``."""
        return self.record.notes

    @property
    def stall(self) -> float | None:
        """The seconds for which the save held up the training, on the rank that waited longest; None if unknown."""
        return self.record.stall

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the version."""
        return self.record.world_size

    @functools.cached_property
    def manifest(self) -> StoredManifest:
        """The manifest, which may be larger than memory."""
        return StoredManifest(self.record, self._checked)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """All of the manifest, in memory."""
        return self.manifest.fragments

    def walk(self, *, by_rank: bool = False) -> Iterator[tuple[FragmentInfo, Fragment]]:
        """The fragments one after the other; see ``StoredManifest.walk``."""
        return self.manifest.walk(by_rank=by_rank)

    @property
    def packs(self) -> Iterator[PackInfo]:
        """Its packs. Reads one fragment after the other."""
        return self.manifest.packs

    def pack_size(self, node: int, group: str, number: int) -> int | None:
        """The bytes of a pack; None if there is no such pack, or if its fragment was not read."""
        return self.manifest.pack_size(node, group, number)

    def chunk(self, name: str, box: Box, *, near: int) -> Chunk | None:
        """The chunk of a tensor that has just this box; ``near``: the rank in whose fragment it should stand, or near it."""
        return self.manifest.chunk(name, box, near=near)

    def finder(self, seeker: Seeker) -> Finder:
        """Return what finds the manifest rows that a rank needs, and reads no more of the manifest than necessary."""
        return self.manifest.finder(seeker)

    @functools.cached_property
    def contents(self) -> Contents:
        """Its tensors and values, summed up in one walk."""
        return contents((fragment for _, fragment in self.walk()), repr(self))

    @functools.cached_property
    def bases(self) -> Bases:
        """The versions that chunks of this one are deltas or references to."""
        return Bases(self, self.sibling)

    def sibling(self, id: int) -> Version | None:
        """Open another version of the repository, by its entry in the root now. If the root does not list this version any more,
        the entries from when this one was found come first: a base may have been thinned together with it."""
        entries = RootRegister(self.store, SYSTEM, repository=self.repository_id).read().listed
        places = (*entries, *self.siblings) if self.entry in entries else (*self.siblings, *entries)
        found = (entry for entry in places if entry.id == id)
        return next((Version(self.store, entry, self.repository_id, self.trust) for entry in found), None)

    @functools.cached_property
    def chunks(self) -> dict[str, list[Chunk]]:
        """The manifest's chunk rows by tensor name. All of them are in memory: see ``rows``."""
        rows: dict[str, list[Chunk]] = {}
        for fragment in self.fragments:
            for chunk in fragment.chunks:
                same = rows.setdefault(chunk.name, [])
                if same and (same[0].shape, same[0].dtype, same[0].kind) != (chunk.shape, chunk.dtype, chunk.kind):
                    raise Damaged(f"rows of {chunk.name!r} disagree on shape, dtype or kind", subject=repr(self))
                same.append(chunk)
        for name, same in rows.items():
            self.check_covered(name, same)
        return rows

    def rows(self, sought: Mapping[str, Sought]) -> Mapping[str, Sequence[Chunk]]:
        """The rows of tensors, at least those that overlap what is sought. A name that the version lacks has none."""
        if self.manifest.is_small or not sought:
            return {name: self.chunks.get(name, []) for name in sought}
        found: dict[str, list[Chunk]] = {name: [] for name in sought}
        for fragment in self.manifest.select(sought):
            for chunk in fragment.chunks:
                found[chunk.name].append(chunk)
        return found

    def check_covered(self, name: str, rows: Sequence[Chunk]) -> None:
        """Raise ``Damaged`` unless the rows cover the tensor; so no absurd shape is allocated."""
        held, size = sum(math.prod(chunk.extent) for chunk in rows), math.prod(rows[0].shape)
        if held != size:
            raise Damaged(f"the manifest covers {held} of {size} elements of {name!r}", subject=repr(self))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """List the tensors, arrays and numpy scalars.

        Returns:
            Their descriptions by name.

        Raises:
            Damaged: The manifest is damaged.
            Untrusted: The version has no trusted signature.
        """
        infos = {}
        for name, one in self.contents.tensors.items():
            nbytes = math.prod(one.shape) * dtypes.dtype(one.dtype).itemsize
            infos[name] = TensorInfo(one.shape, one.dtype, nbytes, one.stored, one.kind, one.group)
        return infos

    def parts(self) -> Mapping[str, int]:
        """List the parts, which actors outside the ranks have saved; see ``docs/parts.md``.

        Returns:
            The bytes of the tensors of each, by name. The names of these begin with ``[part NAME]``. Empty for a thinned version.
        """
        return self.record.parts

    def rounded(self) -> Mapping[str, Rounded]:
        """List the tensors that were rounded; see ``docs/compression.md``.

        Returns:
            The rule and the errors of each, by name.
        """
        return self.contents.rounded

    def values(self, rank: int = 0) -> dict[str, Any]:
        """Read the plain values of a rank, and of all parts.

        Args:
            rank: The rank. If the save had no such rank, each value is that of the lowest rank that has it.

        Returns:
            The values by name.

        Raises:
            StateError: ``rank`` is not an integer of at least 0.
        """
        integer("rank", rank, least=0)
        return {row.name: values.loads(row.text) for row in self.value_rows(rank)}

    def value_rows(self, rank: int) -> Iterator[Value]:
        """The value rows that ``values(rank)`` decodes."""
        rows = (row for fragment in self.manifest.select({}) for row in fragment.values)
        if rank < self.world_size:
            yield from (row for row in rows if rank in row.ranks or part_of(row.name))
            return
        lowest: dict[str, Value] = {}
        for row in rows:
            if row.name not in lowest or min(row.ranks) < min(lowest[row.name].ranks):
                lowest[row.name] = row
        yield from lowest.values()

    def per_rank(self, name: str) -> dict[int, object]:
        """Read what each rank has saved for itself, also ranks that a restore on fewer ranks leaves out.

        Args:
            name: The name of a plain value, as ``values`` lists it, of a container of such values, or of what is in ``PerRank``.

        Returns:
            The value, tensor or container of each rank that has saved one.

        Raises:
            StateError: No rank has saved such a thing, or the container holds tensors of all ranks.
        """
        if not isinstance(name, str):
            raise refused("name", name, "the name of a value or container")
        found: dict[int, dict[Path, object]] = defaultdict(dict)
        tensors: dict[tuple[int, Path], list[Chunk]] = defaultdict(list)
        for part in self.manifest.select({name: Sought(tensor=True, beneath=True)}):
            for row in part.values:
                if (path := beneath(name, parse_path(row.path))) is not None:
                    value = values.loads(row.text)
                    for rank in row.ranks:
                        found[rank][path] = value
            for chunk in part.chunks:
                if f"{chunk.name}.".startswith(f"{name}.") and (path := beneath(name, parse_path(chunk.path))) is not None:
                    if (owner := rank_of(path[-1]) if path else None) is None:
                        raise self._no_value(name, "a container of tensors" if path else "no plain value")
                    tensors[owner, path[:-1]].append(chunk)
        for (owner, path), rows in tensors.items():
            found[owner][path] = self.assemble(rows[0].name, rows)
        if not found:
            raise self._no_value(name, "no plain value")
        return {rank: nested(parts) for rank, parts in sorted(found.items())}

    def _no_value(self, name: str, instead: str) -> StateError:
        remedy = "values() lists the names of plain values, read() reads tensors"
        return StateError(f"version {self.id} holds {instead} {name!r}", remedy=remedy)

    def read(self, name: str, index: Index | None = None) -> Any:
        """Read a tensor or a part of it. Reads only the chunks that overlap.

        Args:
            name: The name, as ``tensors`` and ``values`` list it.
            index: Integers, slices with positive steps, and ``...``. None: the whole tensor.

        Returns:
            A torch tensor on the CPU; without torch a numpy array (bfloat16 and fp8 through ml_dtypes). Values saved as numpy
            arrays, numpy scalars or plain values are returned as such.

        Raises:
            StateError: There is no such name, or the index does not fit.
            Damaged: Stored bytes do not match their digests.
        """
        if not isinstance(name, str):
            raise refused("name", name, "a name that tensors() or values() lists")
        rows = self.rows({name: Sought(tensor=True)})[name]
        if not rows:
            plain = self.values(self.world_size)
            if name in plain:
                return plain[name]
            raise StateError(f"version {self.id} holds no tensor or value {name!r}", remedy="tensors() lists the names")
        return self.assemble(name, rows, index)

    def assemble(self, name: str, rows: Sequence[Chunk], index: Index | None = None) -> Any:
        """What ``read`` gives, of a tensor whose rows are known."""
        self.check_covered(name, rows)
        first = rows[0]
        offset, extent, rest = resolved(index, first.shape, name)
        raw = np.empty(extent, np.dtype(f"V{dtypes.dtype(first.dtype).itemsize}"))
        self.reader().fill([Request(name, rows, (offset, extent), raw)])
        if first.kind == TENSOR:
            tensor = as_torch(raw, first.dtype)
            if tensor is not None:
                return tensor[rest]
        array = raw.view(dtypes.to_numpy(first.dtype))
        array = array[rest] if rest else array
        return array[()] if first.kind == SCALAR else array

    def reader(self, *, threads: int | None = None, turn: float = 0.0) -> PackReader:
        """A reader of this version's packs; see there."""
        return PackReader(self.store, self.id, self.attempt, bases=self.bases, threads=threads, turn=turn)

    def _checked(self, key: str, size: int, digest: str, limit: int) -> bytes:
        if size > limit:
            raise Damaged(f"claims {size} bytes, more than the format allows", subject=key)
        for _ in range(2):  # bytes changed in transit are right the second time
            try:
                data = self.store.get(key, max_bytes=size)
            except NotFound:
                raise Damaged("the object is missing", subject=key) from None
            if len(data) == size and stored_digest(data).hex() == digest:
                return data
        raise Damaged("the object does not match its digest", subject=key)


class Bases:
    """The versions that one version is a delta to. A row names a version only; the root says which attempt that is now.

    Args:
        version: The version.
        look: Finds a version of the repository by its id.
        found: The versions that were found, by id, which all chains share.
    """

    def __init__(self, version: Version, look: Callable[[int], Version | None], found: dict[int, Version] | None = None) -> None:
        self._version, self._look = version, look
        self._depth = 1  # the version's place in the longest chain of deltas that was read
        self._versions = {} if found is None else found
        self._readers: dict[int, PackReader] = {}

    def version(self, id: int) -> Version:
        """The base with this id. Raises ``Damaged`` if there is none, or if it makes the chain too long."""
        base = None
        if id < self._version.id and self._depth < MAX_CHAIN:
            base = self._versions.get(id) or self._look(id)
        if base is None:
            what = f"needs version {id}, which is not there, no older one, or too far down a chain of deltas"
            raise Damaged(what, subject=self._version.record_key)
        if id not in self._versions:
            base.bases = Bases(base, self._look, self._versions)
        base = self._versions.setdefault(id, base)
        base.bases._depth = max(base.bases._depth, self._depth + 1)
        return base

    def all(self) -> Iterator[Version]:
        """Every version that this one cannot be read without, each once."""
        found: dict[int, Version] = {}
        self._collect(found)
        yield from found.values()

    def run(self, chunk: Chunk) -> ByteRun:
        """What is fetched for a delta: the chunk with the same elements in its base, whole."""
        base, found = self._same(chunk)
        (run,) = base.reader().whole([found])
        return run

    def referenced(self, chunk: Chunk) -> tuple[PackReader, Chunk]:
        """The row of a reference, with place and coding of the bytes that it refers to, and the reader of their version."""
        base, found = self._same(chunk)
        if found.is_reference:
            what = f"{chunk.source!r} is a reference itself, to which version {self._version.id} refers"
            raise Damaged(what, subject=base.record_key)
        if base.id not in self._readers:
            self._readers[base.id] = base.reader()
        derivation = found.derivation if chunk.derivation is None else Derivation(found.source, found.words.name)
        row = structs.replace(found, name=chunk.name, dtype=chunk.dtype, raw_digest=chunk.raw_digest, derivation=derivation)
        return self._readers[base.id], row

    def _collect(self, found: dict[int, Version]) -> None:
        for id in self._version.record.bases:
            if id not in found:
                found[id] = self.version(id)
                found[id].bases._collect(found)

    def _same(self, chunk: Chunk) -> tuple[Version, Chunk]:
        """The base of a chunk, and the row there with the same elements."""
        assert chunk.coding.base is not None
        base = self.version(chunk.coding.base)
        near = self._version.manifest.first_rank(chunk.node)  # nodes have other numbers there
        found = base.chunk(chunk.source, chunk.box, near=near)
        if found is None or (found.shape, found.dtype) != (chunk.shape, chunk.words.name):
            box = f"{chunk.source!r}, {chunk.offset} + {chunk.extent}"
            what = f"has no chunk of just {box}, to which version {self._version.id} is a delta"
            raise Damaged(what, subject=base.record_key)
        return base, found
