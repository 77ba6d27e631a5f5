"""The plan of a restore: what is read, from which source, and the expected time. Sources are tried in the order of the plan.

Computed from manifest rows, the contents of node memories, and rates; reads no pack.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...storage.coding.digest import stored_digest
from ...storage.versions.runs import ByteRun

MEMORY, PEER, STORE = "memory", "peer", "store"
"""Sources: this node's memory, that of another node, and the store."""

Progress = Callable[[int], None]


def silent(nbytes: int) -> None:
    """Report no progress."""


_NAMES = {
    MEMORY: "this node's memory",
    PEER: "other nodes' memory",
    STORE: "the store",
    "instead": "the store, in place of nodes that did not send it",
}


_RATES = {MEMORY: 1e9, PEER: 5e8, STORE: 1.2e8}
"""Stored bytes per second that one rank reads, checks and decodes from each source: rounded results of ``benchmarks/restore.py``
on two cores, with an S3 server on the same machine."""


@dataclass(frozen=True)
class Sources:
    """The sources of stored bytes. ``near``: number of a node of the save -> the nodes with all of its objects in memory.
    ``here``: this node's id; empty without a node worker. ``bases``: as ``near``, for the base versions by id."""

    near: Mapping[int, Sequence[str]] = field(default_factory=dict)
    here: str = ""
    bases: Mapping[int, Mapping[int, Sequence[str]]] = field(default_factory=dict)

    def holders(self, node: int, version: int = 0) -> Sequence[str]:
        """The nodes with all objects of node number ``node`` in memory; with a ``version``, of that base."""
        return (self.bases.get(version, {}) if version else self.near).get(node, ())

    def peers(self, node: int, version: int = 0) -> tuple[str, ...]:
        """The other nodes to ask for these objects before the store, in order. Each node starts with another one, which spreads
        the load."""
        others = [holder for holder in self.holders(node, version) if holder != self.here]
        if not others:
            return ()
        turn = int.from_bytes(stored_digest(self.here.encode())[:4], "little") % len(others)
        return (*others[turn:], *others[:turn])

    def first(self, node: int, version: int = 0) -> str:
        """The first source for these objects."""
        if self.here and self.here in self.holders(node, version):
            return MEMORY
        return PEER if self.peers(node, version) else STORE


FROM_STORE = Sources()
"""The sources of a process without a node worker."""


@dataclass(frozen=True)
class PlannedRead:
    """Reads of the packs that one node of the save made: chunks, stored bytes and expected seconds. ``base``: the id of the base
    version that has these packs; 0 for the version itself."""

    node: int
    source: str
    chunks: int
    nbytes: int
    seconds: float
    base: int = 0


@dataclass(frozen=True)
class RestorePlan:
    """``reads``: by node of the save. ``raw``: bytes of the chunks when decoded. ``names``: tensors that are filled.
    ``execute``: reads, checks, decodes and fills; it reports the decoded bytes of each chunk to its argument."""

    reads: tuple[PlannedRead, ...]
    raw: int = 0
    names: frozenset[str] = frozenset()
    execute: Callable[..., None] = field(default=silent, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Stored bytes that are read."""
        return sum(read.nbytes for read in self.reads)

    @property
    def seconds(self) -> float:
        """Expected seconds of all reads, one after another."""
        return sum(read.seconds for read in self.reads)

    def summary(self) -> str:
        """One line: bytes by source, and seconds."""
        total = Counter[str]()
        for read in self.reads:
            total[read.source] += read.nbytes
        return f"{by_source(total)}, in about {self.seconds:.1f} s"


def build(
    runs: Iterable[ByteRun],
    sources: Sources,
    *,
    version: int,
    names: frozenset[str] = frozenset(),
    execute: Callable[..., None] = silent,
) -> RestorePlan:
    """The plan to read these runs of packs, of ``version`` and of those that it refers to, and the bases of their deltas."""
    of: dict[tuple[int, int], list[ByteRun]] = defaultdict(list)
    raw = 0
    for run in runs:
        of[run.version if run.version != version else 0, run.pieces[0].chunk.node].append(run)
        raw += sum(piece.chunk.nbytes for piece in run.pieces)
        for beneath in run.bases:
            of[beneath.version, beneath.pieces[0].chunk.node].append(beneath)
    reads = []
    for (base, node), found in sorted(of.items()):
        source = sources.first(node, base)
        nbytes, chunks = sum(run.length for run in found), sum(len(run.pieces) for run in found)
        reads.append(PlannedRead(node, source, chunks, nbytes, nbytes / _RATES[source], base))
    return RestorePlan(tuple(reads), raw, names, execute)


def by_source(read: Mapping[str, int]) -> str:
    """Stored bytes by source, as text."""
    return ", ".join(f"{nbytes / 1e6:,.1f} MB from {_NAMES[source]}" for source, nbytes in read.items() if nbytes) or "nothing"
