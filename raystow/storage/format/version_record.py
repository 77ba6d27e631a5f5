"""The version record: what a version consists of, with the digests of its fragments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import Damaged
from ..limits import MAX_DIFFERENCES, MAX_FRAGMENT, MAX_NUMBER, MAX_PARTS, MAX_ROWS, most_cells, most_text
from . import keys, records, replica_difference, values
from .json_text import shown
from .parts import is_name
from .replica_difference import ReplicaDifference
from .root import Entry


@dataclass(frozen=True)
class FragmentInfo:
    """One manifest fragment. ``digest``: BLAKE3, hexadecimal. ``ranks``: whose shards it describes; of parts, ``part_number``.
    ``stall``: the longest time in seconds that the save held up the training loop of one of these ranks, if known. ``bases``: ids
    of the bases of its chunks, ascending. ``packs``: the number of packs that its rows name; None in records that list all packs.
    """

    node: int
    size: int
    digest: str
    ranks: tuple[int, ...]
    chunks: int
    raw: int
    stored: int
    stall: float | None = None
    bases: tuple[int, ...] = ()
    packs: int | None = None

    @property
    def memory(self) -> int:
        """Bytes that the fragment may take while it is read and parsed."""
        return self.size + 2 * most_text(self.size) + 4 * most_cells(self.size)


@dataclass(frozen=True)
class RestoreInfo:
    """One restore by ``ranks`` ranks, ``at`` seconds since 1970, which took ``seconds`` from the first rank's call to the last
    one's success. ``read``: stored bytes by source."""

    version: int
    step: int
    at: float
    ranks: int
    seconds: float
    read: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Thinned:
    """Describes how a version was thinned. ``attempt``: the complete version. ``at``: the time, in seconds since 1970.
    ``groups``: the groups of tensors that were kept. ``mantissa_bits``, ``base_bits``: the mantissa bits of its elements, and
    those of its base's elements; None for all."""

    attempt: str
    at: float
    groups: tuple[str, ...]
    mantissa_bits: int | None = None
    base_bits: int | None = None


@dataclass(frozen=True)
class PackInfo:
    """One pack; ``size`` in bytes."""

    node: int
    group: str
    number: int
    size: int

    @property
    def place(self) -> tuple[int, str, int]:
        """What its key is made of."""
        return self.node, self.group, self.number


class Packs(Collection[PackInfo]):
    """The packs that a record lists, by column. There may be hundreds of thousands: as objects they would slow the garbage
    collector down for longer than it takes to read them."""

    def __init__(self, nodes: Sequence[int], groups: Sequence[str], numbers: Sequence[int], sizes: Sequence[int]) -> None:
        self._nodes, self._groups, self._numbers, self._sizes = nodes, groups, numbers, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[PackInfo]:
        return map(PackInfo, self._nodes, self._groups, self._numbers, self._sizes)

    def __contains__(self, pack: object) -> bool:
        return pack in tuple(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collection) and tuple(self) == tuple(other)


@dataclass(frozen=True)
class VersionRecord:
    """``created``: seconds since 1970. ``metrics``: plain values by name. ``packs``: None if the fragments' rows name
    them, as in all new records. ``thinned``: if the version was thinned. ``saved``: see ``Entry``. For people: ``writer`` (names
    and versions of software), ``coding`` (the codec of GPU tensors, and whether the version is a delta, with reasons),
    ``restores`` (since the version before), ``lossy`` (which tensors were rounded, and how), ``provenance`` (command line,
    commit, packages, hosts, and the version that was resumed from), ``notes`` (the user's plain values by name),
    ``differences`` (tensors of which ranks held other bits than others). ``parts``: raw bytes by name."""

    repository: str
    id: int
    attempt: str
    epoch: int
    step: int
    created: float
    world_size: int
    metrics: dict[str, object] = field(default_factory=dict)
    writer: dict[str, str] = field(default_factory=dict)
    fragments: tuple[FragmentInfo, ...] = ()
    packs: Collection[PackInfo] | None = ()
    coding: dict[str, str] = field(default_factory=dict)
    restores: tuple[RestoreInfo, ...] = ()
    lossy: dict[str, str] = field(default_factory=dict)
    thinned: Thinned | None = None
    saved: str = ""
    provenance: dict[str, str] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)
    differences: tuple[ReplicaDifference, ...] = ()
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def stall(self) -> float | None:
        """The seconds that the save held up the training, which waits for its slowest rank; None if unknown."""
        return max((f.stall for f in self.fragments if f.stall is not None), default=None)

    @property
    def pack_count(self) -> int:
        """The number of packs."""
        return sum(f.packs or 0 for f in self.fragments) if self.packs is None else len(self.packs)

    @property
    def raw(self) -> int:
        """Bytes of all shards before coding."""
        return sum(f.raw for f in self.fragments)

    @property
    def stored(self) -> int:
        """Bytes of all packs."""
        return sum(f.stored for f in self.fragments)

    @property
    def bases(self) -> tuple[int, ...]:
        """Ids of the versions that it needs directly, ascending."""
        return tuple(sorted({base for f in self.fragments for base in f.bases}))

    def dump(self) -> bytes:
        """The bytes of ``version.json``."""
        # Not asdict: it copies every number of thousands of fragments.
        fields = {
            **vars(self),
            "metrics": {name: values.encode(value) for name, value in self.metrics.items()},
            "fragments": [_known(f) for f in self.fragments],
            "packs": None if self.packs is None else [vars(p) for p in self.packs],
            "restores": [vars(r) for r in self.restores],
            "thinned": _known(self.thinned) if self.thinned is not None else None,
            "notes": {name: values.encode(value) for name, value in self.notes.items()},
            "differences": [vars(one) for one in self.differences],
        }
        absent: dict[str, object] = {
            "packs": None,
            "thinned": None,
            "saved": "",
            "provenance": {},
            "notes": {},
            "differences": [],
            "parts": {},
        }
        return records.dump({n: value for n, value in fields.items() if n not in absent or value != absent[n]}, self.key())

    @staticmethod
    def load(data: bytes, key: str) -> VersionRecord:
        """Parse and check a record whose digest was compared with the root's."""
        fields = records.load(data, key)
        fragments = tuple(_fragment(info, key) for info in records.objects(fields, "fragments", key))
        if "packs" not in fields and any(info.packs is None for info in fragments):
            raise Damaged("neither the record nor each of its fragments has a field 'packs'", subject=key)
        restores = records.objects(fields, "restores", key, optional=True)
        metrics = records.field(fields, "metrics", dict, key)
        differences = records.objects(fields, "differences", key, optional=True)
        if len(differences) > MAX_DIFFERENCES:
            raise Damaged(f"field 'differences' has {len(differences)} entries, more than {MAX_DIFFERENCES}", subject=key)
        parts = records.field(fields, "parts", dict, key) if "parts" in fields else {}
        if len(parts) > MAX_PARTS or not all(map(is_name, parts)):
            raise Damaged(f"field 'parts' is {shown(parts)}: more than {MAX_PARTS}, or no names of parts", subject=key)
        thinned = records.field(fields, "thinned", dict, key) if "thinned" in fields else None
        notes = records.field(fields, "notes", dict, key) if "notes" in fields else {}
        if records.field(fields, "world_size", int, key) > MAX_NUMBER:
            raise Damaged(f"field 'world_size' is {fields['world_size']}, more than {MAX_NUMBER} ranks", subject=key)
        bits = ("mantissa_bits", "base_bits")
        return records.parse(
            VersionRecord,
            fields,
            key,
            optional=("coding", "lossy", "saved", "provenance", "parts"),
            metrics={name: values.decode(form) for name, form in metrics.items()},
            fragments=fragments,
            packs=_listed(fields, key) if "packs" in fields else None,
            restores=tuple(records.parse(RestoreInfo, restore, key) for restore in restores),
            thinned=records.parse(Thinned, thinned, key, optional=bits) if thinned is not None else None,
            notes={name: values.decode(form) for name, form in notes.items()},
            differences=tuple(replica_difference.parse(one, key) for one in differences),
        )

    @property
    def bits(self) -> int | None:
        """The mantissa bits to which its weights were rounded when it was thinned; None for all."""
        return self.thinned.mantissa_bits if self.thinned is not None else None

    @property
    def base_bits(self) -> int | None:
        """The mantissa bits of its base then; None for all."""
        return self.thinned.base_bits if self.thinned is not None else None

    def entry(self, digest: bytes, size: int) -> Entry:
        """The version's entry in the root, given BLAKE3 and size in bytes of this record."""
        return Entry(
            id=self.id,
            attempt=self.attempt,
            digest=digest.hex(),
            size=size,
            step=self.step,
            created=self.created,
            raw=self.raw,
            stored=self.stored,
            bases=self.bases,
            groups=self.thinned.groups if self.thinned is not None else (),
            saved=self.saved,
        )

    def key(self) -> str:
        """The key of the record."""
        return keys.record(self.id, self.attempt)


def check_part(info: FragmentInfo, node: int, *, nodes: int) -> None:
    """Raise ``Damaged`` if readers would refuse what number ``node`` of so many nodes reports of its part of a version."""
    if not 0 <= info.node == node < nodes or info.packs is None:
        raise Damaged("the part is that of another node, or does not say how many packs it has")
    if not records.DIGEST.fullmatch(info.digest) or not 0 <= info.size <= MAX_FRAGMENT:
        raise Damaged(f"an impossible fragment of {info.size} bytes with digest {shown(info.digest)}")
    _fragment({**_known(info), "ranks": [*info.ranks], "bases": [*info.bases]}, _EMPTY.key())


def check_restore(info: RestoreInfo) -> None:
    """Raise ``Damaged`` if readers would refuse what is reported of a restore."""
    record = replace(_EMPTY, restores=(info,))
    VersionRecord.load(record.dump(), record.key())


_EMPTY = VersionRecord("", 1, "0" * 16, 0, 0, 0.0, 1, packs=None)


def _known(part: FragmentInfo | Thinned) -> dict[str, object]:
    """The fields, but for those that may be missing and are."""
    return {name: value for name, value in vars(part).items() if value is not None and (name, value) != ("bases", ())}


def _listed(fields: records.Json, key: str) -> Packs:
    rows, kinds = records.objects(fields, "packs", key), {"node": int, "group": str, "number": int, "size": int}
    return Packs(*(records.column(rows, name, kind, key) for name, kind in kinds.items()))


def _fragment(fields: records.Json, key: str) -> FragmentInfo:
    ranks = records.integers(fields, "ranks", key, most=MAX_NUMBER)
    info = records.parse(FragmentInfo, fields, key, optional=("stall", "bases", "packs"), ranks=ranks)
    if info.chunks > MAX_ROWS:
        raise Damaged(f"field 'chunks' is {info.chunks}, more than the {MAX_ROWS} rows of a fragment", subject=key)
    if info.packs is not None and info.packs > info.chunks:
        raise Damaged(f"field 'packs' is {info.packs}, more than the {info.chunks} chunks in them", subject=key)
    return info
