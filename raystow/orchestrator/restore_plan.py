"""What restoring reads, from where, and how long it should take; made of manifest rows, of who has what in memory, and of rates.

Planning reads no pack and asks nobody. The order of sources that a plan tells is the one in which they are tried.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..storage.coding.digest import stored_digest
from ..storage.reader import Run
from ..workers.fetching.claims import ALONE, Company

MEMORY, PEER, STORE = "memory", "peer", "store"
"""Sources: this node's memory, that of another node, and the store."""

Progress = Callable[[int], None]

_WHERE = {
    MEMORY: "this node's memory",
    PEER: "other nodes' memory",
    STORE: "the store",
    "instead": "the store, in place of nodes that did not send it",
}


@dataclass(frozen=True)
class Rates:
    """Stored bytes a second that one rank gets from each source, checked and decoded. The defaults are rounded from
    ``benchmarks/restore.py`` on two cores, the store being an S3 server on the same machine."""

    memory: float = 1e9
    peer: float = 5e8
    store: float = 1.2e8

    def of(self, source: str) -> float:
        """Bytes a second from one source."""
        return {MEMORY: self.memory, PEER: self.peer, STORE: self.store}[source]


@dataclass(frozen=True)
class Sources:
    """Where stored bytes can be had. ``near``: number of a node of the save -> the nodes that have all of its objects in memory.
    ``here``: this node's id; empty where there is no node worker, and so no memory either. ``company``: the nodes that restore
    together, and read from the store what several of them want only once. ``bases``: as ``near``, of the versions with these ids,
    to which the one that is restored is a difference."""

    near: Mapping[int, Sequence[str]] = field(default_factory=dict)
    here: str = ""
    rates: Rates = Rates()
    company: Company = ALONE
    bases: Mapping[int, Mapping[int, Sequence[str]]] = field(default_factory=dict)

    def holders(self, node: int, version: int = 0) -> Sequence[str]:
        """The nodes that have all objects of node number ``node`` in memory; with a ``version``, of that one of ``bases``."""
        return (self.bases.get(version, {}) if version else self.near).get(node, ())

    def peers(self, node: int, version: int = 0) -> tuple[str, ...]:
        """The other nodes to ask for these objects, in this order, before the store: none where the store is faster. Each node
        begins with another one, so that not all ask the same."""
        others = [holder for holder in self.holders(node, version) if holder != self.here]
        if not others or self.rates.peer < self.rates.store:
            return ()
        turn = int.from_bytes(stored_digest(self.here.encode())[:4], "little") % len(others)
        return (*others[turn:], *others[:turn])

    def first(self, node: int, version: int = 0) -> tuple[str, str, str]:
        """The source that is tried first for these objects, the node that has them, and why that one."""
        if self.here and self.here in self.holders(node, version):
            return MEMORY, self.here, "kept by this node"
        if peers := self.peers(node, version):
            return PEER, peers[0], f"node {peers[0][:8]} keeps a copy" + (f", {len(peers) - 1} more do" if peers[1:] else "")
        why = "the store is faster than other nodes" if self.holders(node, version) else "nobody has it in memory"
        nodes = len(self.company.nodes)
        return STORE, "", why + (f"; what several of {nodes} nodes want one of them reads" if nodes > 1 else "")


FROM_STORE = Sources()
"""For a process without a node worker."""


@dataclass(frozen=True)
class Part:
    """What is read of the packs that one node of the save made: number of chunks and of ranged reads, stored bytes, and the
    seconds they should take. ``base``: the id of an earlier version whose packs these are; 0 for the version itself."""

    node: int
    source: str
    holder: str
    chunks: int
    requests: int
    nbytes: int
    seconds: float
    why: str
    base: int = 0

    @property
    def whose(self) -> str:
        """Whose packs they are."""
        return f"version {self.base}, node {self.node}" if self.base else f"node {self.node}"


@dataclass(frozen=True)
class RestorePlan:
    """``parts``: by node of the save. ``raw``: bytes of the chunks when decoded. ``names``: tensors that are filled. ``fill``:
    what does it."""

    parts: tuple[Part, ...]
    raw: int = 0
    names: frozenset[str] = frozenset()
    fill: Callable[[Progress], None] = field(default=lambda progress: None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Stored bytes that are read."""
        return sum(part.nbytes for part in self.parts)

    @property
    def seconds(self) -> float:
        """What all parts take, one after another."""
        return sum(part.seconds for part in self.parts)

    def explain(self) -> list[str]:
        """A line for each node of the save: what is read of its packs, from where, how long that should take, and why."""
        return [
            f"{part.whose}: {part.nbytes:,} bytes of {part.chunks:,} chunks in {part.requests:,} reads from "
            f"{_WHERE[part.source]}, about {part.seconds:.2f} s: {part.why}"
            for part in self.parts
        ]

    def summary(self) -> str:
        """One line: bytes by source, and seconds."""
        read = Counter[str]()
        for part in self.parts:
            read[part.source] += part.nbytes
        return f"{told(read)}, in about {self.seconds:.1f} s"

    def execute(self, progress: Progress = lambda nbytes: None) -> None:
        """Read, check, decode and fill; see ``restore.restore``. ``progress`` is told the decoded bytes of each chunk."""
        self.fill(progress)


def build(
    runs: Iterable[Run],
    sources: Sources,
    *,
    names: frozenset[str] = frozenset(),
    fill: Callable[[Progress], None] = lambda progress: None,
) -> RestorePlan:
    """The plan to read these runs of packs, and those of other versions that they are differences to."""
    of: dict[tuple[int, int], list[Run]] = defaultdict(list)
    raw = 0
    for run in runs:
        of[0, run.pieces[0].chunk.node].append(run)
        raw += sum(piece.chunk.nbytes for piece in run.pieces)
        for base in run.bases:
            of[base.version, base.pieces[0].chunk.node].append(base)
    parts = []
    for (version, node), found in sorted(of.items()):
        source, holder, why = sources.first(node, version)
        why = f"it is a difference to this version; {why}" if version else why
        nbytes, chunks = sum(run.length for run in found), sum(len(run.pieces) for run in found)
        seconds = nbytes / sources.rates.of(source)
        parts.append(Part(node, source, holder, chunks, len(found), nbytes, seconds, why, version))
    return RestorePlan(tuple(parts), raw, names, fill)


def told(read: Mapping[str, int]) -> str:
    """Stored bytes by source, in words."""
    return ", ".join(f"{nbytes / 1e6:,.1f} MB from {_WHERE[source]}" for source, nbytes in read.items() if nbytes) or "nothing"
