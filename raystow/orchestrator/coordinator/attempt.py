"""One attempt to make a version, and the record that makes a complete attempt a version."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ...state.coverage import differing, total
from ...storage.commit.committer import Committer
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format import values
from ...storage.format.capacity import check_record
from ...storage.format.parts import is_part, names_in, part_number
from ...storage.format.rank_spans import ranks_text
from ...storage.format.replica_difference import ReplicaDifference
from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo, RestoreInfo, VersionRecord
from ...storage.retention.policy import Policy
from ...storage.runtime.spans import NO_SPAN, ROOT, Span
from ...workers.protocol.messages import Begin, ExportOrder, Incarnation, RanksWarning, ReplicaQuestion
from ...workers.protocol.messages.coordinator import RankSaveRequest
from ..late_ranks import LATE, late_text
from .placement_check import PlacementCheck
from .replica_comparison import ReplicaComparison


class Phase(enum.Enum):
    """The state of an attempt."""

    GATHERING = "waiting for ranks"
    COMPARING = "comparing replicas"
    SEALING = "waiting for manifest fragments"
    READY = "waiting for the commit"
    COMMITTED = "a version"
    ABORTED = "given up"

    @property
    def over(self) -> bool:
        return self in (Phase.COMMITTED, Phase.ABORTED)


UNSTORED = (Phase.GATHERING, Phase.COMPARING, Phase.SEALING)
"""The phases of attempts that nodes have not stored."""

ANOTHER_RUN = 'if another run writes here, stop it or give it a URI of its own; on_fenced="takeover" takes the repository over'
"""The remedy for two runs with one repository."""

_LISTED = 3  # metrics that a warning names
_HOSTS = 64  # that a record names


@dataclass
class Attempt:
    """One attempt to make a version.

    ``metrics``: rank -> its metrics as JSON. ``ranks``: rank -> its node. ``saves``: rank -> the number of its save. ``hosts``:
    host -> its GPU.
    ``delivered``: rank -> its process, which has ended after its node worker had all of the save. ``owned_dtensors``: DTensor
    -> the first rank of its mesh. ``nodes``: node -> its number in the attempt. ``staged`` and ``stored``: fragments by node
    number, whose packs and file are complete in memory and durable. ``failure``: why it was aborted. ``created``: when all was
    staged. ``promised``: the record that it will have. ``restores``: restores that its record reports. ``base``: the version
    that it is compared with; ``deltas``: whether changed chunks may be deltas to that. ``takes_over``: whether a rank asks to
    take the repository over from another run. ``raises``: whether a rank asks to fail the save if ranks hold other bits of the
    same tensor; ``comparison``: of these bits; ``differences``: what it has found.
    ``placement``: if the ranks' chunks are no whole tensors. ``span``: from the first rank on.
    ``declared``: names of parts, joined by commas; ``parts``: their member numbers -> their bytes; ``cut``: that of rank 0. They
    are compared with nothing. ``past``: that of the ranks; see ``RankSaveRequest``. ``opened``, ``deadline``, ``ended``:
    monotonic seconds. ``progress``: when one reported last; ``warn_at``: when to look for ranks that are late; ``warnings``:
    about them and others.
    """

    id: int
    attempt: str
    step: int
    world_size: int
    opened: float = 0.0
    deadline: float = 0.0
    phase: Phase = Phase.GATHERING
    failure: RaystowError | None = None
    metrics: dict[int, Mapping[str, str]] = field(default_factory=dict)
    coding: dict[str, str] = field(default_factory=dict)
    lossy: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    retention: Policy | None = None
    export: ExportOrder | None = None
    ranks: dict[int, str] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    delivered: dict[int, Incarnation] = field(default_factory=dict)
    replicated: dict[int, int] = field(default_factory=dict)
    owned_dtensors: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    staged: dict[int, FragmentInfo] = field(default_factory=dict)
    created: float = 0.0
    restores: tuple[RestoreInfo, ...] = ()
    promised: VersionRecord | None = None
    expected: int = 0
    covered: dict[int, int] = field(default_factory=dict)
    stored: dict[int, FragmentInfo] = field(default_factory=dict)
    entry: Entry | None = None
    swept: bool = False
    generation: int = 0
    base: Entry | None = None
    deltas: bool = False
    ended: float = 0.0
    takes_over: bool = False
    progress: float = 0.0
    warn_at: float = 0.0
    warnings: list[RanksWarning] = field(default_factory=list)
    raises: bool = False
    comparison: ReplicaComparison = field(default_factory=ReplicaComparison)
    placement: PlacementCheck | None = None
    differences: tuple[ReplicaDifference, ...] = ()
    span: Span = NO_SPAN
    declared: str = ""
    parts: dict[int, int] = field(default_factory=dict)
    cut: Mapping[str, str] = field(default_factory=dict)
    past: str = ""

    def __post_init__(self) -> None:
        self.parts = {part_number(name): 0 for name in names_in(self.declared)}

    @property
    def patience(self) -> float:
        """Seconds without progress after which late ranks and parts are named: 30, or half of what the save has."""
        return min(LATE, (self.deadline - self.opened) / 2)

    @property
    def stall(self) -> float | None:
        """The longest stall of a rank, in seconds."""
        return max((info.stall for info in self.stored.values() if info.stall is not None), default=None)

    @property
    def members(self) -> set[int]:
        """The numbers of all ranks and parts."""
        return {*range(self.world_size), *self.parts}

    @property
    def first_save(self) -> int:
        """The least number of the save on a rank. All ranks count their saves alike, parts do not."""
        return min(save for rank, save in self.saves.items() if not is_part(rank))

    @property
    def subject(self) -> str:
        """Names the save in errors."""
        return f"save of step {self.step}"

    @property
    def reason(self) -> str:
        """Why it was aborted; "" if it was not."""
        return self.failure.what if self.failure is not None else ""

    def result(self) -> Entry:
        """The entry of the version, once the attempt is over. Raises the failure if there is none."""
        if self.failure is not None:
            raise self.failure
        if self.entry is None:
            raise SaveFailed(f"the attempt is {self.phase.value}", subject=self.subject)
        return self.entry

    def join(self, begin: Begin, now: float) -> None:
        """Add a rank that begins to save."""
        request, contents = begin.request, begin.contents
        if not self.ranks:
            self.span = Span("save", request.trace or ROOT, version=self.id, step=self.step, ranks=self.world_size)
        self.progress = now
        self.ranks[request.rank], self.saves[request.rank] = begin.node, request.save
        self.coding.update(contents.coding)
        self.expected = total((self.expected, contents.expected))
        if is_part(request.rank):
            self.parts[request.rank] = contents.nbytes
            return
        self.past = self.past or request.past
        self.metrics[request.rank] = request.metrics
        self.replicated[request.rank] = contents.replicated
        self.lossy.update(request.lossy)
        self.describe(request.rank, request.provenance)
        self.notes = request.notes or self.notes
        self.retention = request.retention or self.retention
        self.export = request.export or self.export
        self.takes_over = self.takes_over or request.on_fenced == "takeover"
        self.raises = self.raises or request.on_difference == "raise"
        self.cut = request.cut if request.rank == 0 else self.cut

    def describe(self, rank: int, provenance: Mapping[str, str]) -> None:
        """Note what a rank says of its hardware and, if it is rank 0, of its program."""
        rest = dict(provenance)
        self.hosts[rest.pop("host", "")] = rest.pop("gpu", "")
        if rank == 0:
            self.provenance = rest

    def unlike(self, request: RankSaveRequest) -> str:
        """Why a rank cannot join: it declares other parts, or has another past; "" if neither."""
        if request.parts != self.declared:
            what = f"rank {request.rank} declares parts {request.parts!r}, other ranks {self.declared!r}"
            return f"{what}: give all ranks the same parts="
        what = f"rank {request.rank} has not restored together with the ranks that save this step"
        return f"{what}: restore on all ranks" if self.has_other_past(request) else ""

    def has_other_past(self, request: RankSaveRequest) -> bool:
        """Whether a rank or part has not restored together with the ranks here."""
        return "" != request.past != self.past != ""

    def add_owned(self, rank: int, dtensors: Iterable[str]) -> str:
        """Note the DTensors of which a rank is the first holder. Returns why a DTensor has two meshes, both of which would
        store all of it; "" if none has."""
        for name in dtensors:
            other = self.owned_dtensors.setdefault(name, rank)
            if other != rank:
                what = f"ranks {other} and {rank} both hold {name!r}, on unrelated meshes"
                return f"{what}: cut both from one mesh, or give the tensors different names"
        return ""

    @property
    def too_large(self) -> SaveFailed | None:
        """Why it cannot become a version, if its record would be too large."""
        metrics = self.metrics.get(0, {})
        try:
            texts = *metrics, *metrics.values(), *self.lossy.values(), *self.provenance.values(), *self.notes.values()
            check_record(len(self.nodes), self.world_size + len(self.parts), (*texts, self.declared))
        except SaveFailed as error:
            return SaveFailed(error.what, subject=self.subject, remedy=error.remedy)
        return None

    @property
    def odd_ranks(self) -> list[int]:
        """The ranks that hold other plain tensors than rank 0."""
        if len({*self.replicated.values()}) < 2:
            return []
        return [rank for rank, held in sorted(self.replicated.items()) if held != self.replicated[0]]

    def needs(self, node: int) -> bool:
        """Whether it cannot become a version without more work of a node, by number."""
        return self.phase in UNSTORED and node not in self.stored

    @property
    def overdue(self) -> str:
        """What was missing at its deadline."""
        seconds = self.deadline - self.opened
        if self.phase is Phase.GATHERING:
            missing = sorted(self.members - self.covered.keys())
            who = ranks_text(missing) if is_part(missing[-1]) else f"ranks {missing}"
            return f"{who} had not delivered their shards after {seconds:.0f} s"
        late = sorted(node for node, number in self.nodes.items() if number not in self.stored)
        return f"nodes {late} had not stored their shards after {seconds:.0f} s"

    def late(self, member: Callable[[int], Incarnation | None], now: float) -> RanksWarning | None:
        """Warn of the ranks that others wait for; None if there are none, or not for long enough. The node of the
        first rank that waits logs it."""
        every, quiet = self.members, now - self.progress
        unstored = {rank for rank, node in self.ranks.items() if self.nodes[node] not in self.stored}
        if absent := every - self.ranks.keys():
            late, waiting, what = absent, {*self.ranks}, f"not called save for {now - self.opened:.0f} s"
        elif self.phase is Phase.COMPARING:
            return None
        elif self.phase is Phase.GATHERING:
            late, waiting = every - self.covered.keys(), {*self.covered}
            what = f"begun to save, but not delivered all data to the node worker, with no progress for {quiet:.0f} s"
        else:
            late, waiting, what = unstored, every - unstored, f"stored nothing more for {quiet:.0f} s: a store may hang"
        if not late or not waiting or (quiet < self.patience and not absent):
            return None
        return self.warn(late_text(late, waiting, what, member), min(waiting))

    def warn_of_metrics(self) -> bool:
        """Warn of metrics of other ranks that are not those of rank 0, which the version has. Returns whether there are any."""
        of_rank_0, conflicts = self.metrics[0], dict[str, str]()
        others = sorted(rank for rank, metrics in self.metrics.items() if metrics != of_rank_0)
        for rank in others:
            metrics = self.metrics[rank]
            for name in sorted({*metrics, *of_rank_0} - conflicts.keys()):
                if metrics.get(name) != of_rank_0.get(name):
                    texts = (f"rank {one}: {those.get(name, 'none')}" for one, those in ((0, of_rank_0), (rank, metrics)))
                    conflicts[name] = f"{name} ({'; '.join(texts)})"
        if conflicts:
            more = f" and {len(conflicts) - _LISTED} more" if len(conflicts) > _LISTED else ""
            what = f"{', '.join([*conflicts.values()][:_LISTED])}{more}"
            self.warn(f"ranks have other metrics than rank 0, whose metrics the version has: {what}", 0)
        return bool(conflicts)

    def incomplete(self, plain_tensors: Mapping[int, tuple[str, ...]]) -> str | PlacementCheck:
        """Why what all ranks have delivered are no whole tensors; "" if they are. ``plain_tensors``: by rank."""
        if odd := self.odd_ranks:
            same = "all ranks must hold the same (names, shapes, dtypes and ties), since they are stored once"
            none = {rank for rank, held in self.replicated.items() if not held}
            what = f"ranks {odd} hold other plain tensors than rank 0{first_differences(plain_tensors, odd[0], none)}"
            return f"{what}: {same}; shard what differs as DTensors"
        if (covered := total(self.covered.values())) == self.expected:
            return ""
        found = differing(covered, self.expected, self.owned_dtensors)
        return PlacementCheck(self.covered, found[0] if len(found) == 1 else "")

    def warning_after(self, number: int, node: int) -> RanksWarning | None:
        """The first warning after a number that a node has to log."""
        return next((one for one in self.warnings if one.number > number and one.to == node), None)

    @property
    def inquiry(self) -> ReplicaComparison | PlacementCheck:
        """What nodes are asked about."""
        return self.placement or self.comparison

    @property
    def misplaced(self) -> SaveFailed | None:
        """Why it fails, if the chunks of its ranks are no whole tensors."""
        remedy = "correct the shapes, offsets and ranks of its boxes"
        return None if self.placement is None else SaveFailed(str(self.placement), subject=self.subject, remedy=remedy)

    def questions(self, node: int) -> tuple[ReplicaQuestion, ...]:
        """What a node has to answer of its ranks."""
        if self.phase is not Phase.COMPARING:
            return ()
        return self.inquiry.questions({rank for rank, home in self.ranks.items() if self.nodes[home] == node})

    def warn(self, text: str, rank: int) -> RanksWarning:
        """Let the node of a rank log a problem."""
        self.warnings.append(RanksWarning(len(self.warnings) + 1, text, self.nodes[self.ranks[rank]]))
        return self.warnings[-1]

    def warn_first(self, notices: list[str], rank: int) -> None:
        """Let rank 0 log problems that are not of a save, each once."""
        while rank == 0 and notices:
            self.warn(notices.pop(0), 0)

    def end(self, now: float) -> None:
        """Drop the data of ranks and nodes: 100 MB for thousands of nodes, and the newest attempts are kept."""
        self.ended = now
        self.span.end(self.failure or "")
        self.ranks, self.saves, self.delivered, self.replicated, self.owned_dtensors, self.nodes = {}, {}, {}, {}, {}, {}
        self.covered, self.staged, self.stored, self.promised, self.metrics = {}, {}, {}, None, {}
        self.provenance, self.notes, self.hosts = {}, {}, {}
        self.comparison, self.placement = ReplicaComparison(), None


def version_record(
    committer: Committer, attempt: Attempt, fragments: Mapping[int, FragmentInfo], *, created: float, writer: Mapping[str, str]
) -> VersionRecord:
    """The record of an attempt with these fragments, by node number. ``writer``: names and versions of the software."""
    return VersionRecord(
        repository=committer.catalog.id,
        id=attempt.id,
        attempt=attempt.attempt,
        epoch=committer.epoch,
        step=attempt.step,
        created=created,
        world_size=attempt.world_size,
        metrics={name: values.loads(text) for name, text in attempt.metrics.get(0, {}).items()},
        coding=attempt.coding,
        lossy=attempt.lossy,
        writer=dict(writer),
        fragments=tuple(info for _, info in sorted(fragments.items())),
        packs=None,
        restores=attempt.restores,
        provenance={**attempt.provenance, **_hosts(attempt.hosts)},
        notes={name: values.loads(text) for name, text in attempt.notes.items()},
        differences=attempt.differences,
        parts=dict(zip(names_in(attempt.declared), attempt.parts.values(), strict=True)),
    )


def _hosts(hosts: Mapping[str, str]) -> dict[str, str]:
    """Name the hosts and their GPUs, if they are known."""
    named = [f"{host} ({gpu})" if gpu else host for host, gpu in sorted(hosts.items()) if host]
    more = f" and {len(named) - _HOSTS} more" if len(named) > _HOSTS else ""
    return {"hosts": ", ".join(named[:_HOSTS]) + more} if named else {}


def first_differences(plain_tensors: Mapping[int, tuple[str, ...]], rank: int, none: Collection[int] = ()) -> str:
    """Name tensors that only ``rank`` or rank 0 has; "" if a restart has lost which they have. ``plain_tensors``: by rank.
    ``none``: the ranks that have none."""
    plain = {r: dict.fromkeys(plain_tensors.get(r, ())) for r in (rank, 0)}
    examples = [
        f"rank {one} has {', '.join(only[:3])}"
        for one, other in ((rank, 0), (0, rank))
        if (only := [tensor for tensor in plain[one] if tensor not in plain[other]])
    ]
    return f" ({'; '.join(examples)})" if all(held or r in none for r, held in plain.items()) and examples else ""
