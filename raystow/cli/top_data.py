"""The state of one run for ``raystow top``, derived from two observations of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ..orchestrator.coordinator.status import ClusterStatus
from ..storage.errors import ClusterError, StateError
from ..storage.format.root import Entry
from ..workers.protocol.messages import (
    AttemptStatus,
    CoordinatorStatus,
    FailedAttempt,
    NodeStatus,
    OpenAttempt,
    ReplicationProgress,
)
from .output import ratio


@dataclass(frozen=True)
class CoordinatorRow:
    """Whether the coordinator answers, and what identifies it."""

    answers: bool
    repository: str | None = None
    epoch: int | None = None


@dataclass(frozen=True)
class NewestRow:
    """The newest version; ``age`` in seconds."""

    id: int
    step: int
    created: float
    age: float
    raw: int
    stored: int
    ratio: float | None


@dataclass(frozen=True)
class NodeRow:
    """A node worker. Rates in bytes per second are None before the second observation, and after a restart of the worker."""

    node: str
    ranks: int
    coded_per_second: int | None
    stored_per_second: int | None
    uploads: int
    queue: int
    queue_limit: int
    memory: int
    memory_limit: int
    copies: ReplicationProgress
    saves: Sequence[AttemptStatus]
    answers: bool = True


@dataclass(frozen=True)
class SilentNode:
    """A node whose worker does not answer."""

    node: str
    answers: bool = False


@dataclass(frozen=True)
class RunState:
    """A run at time ``at``. Until its coordinator has answered once, ``uri`` is None and fields with a default are unknown."""

    uri: str | None
    at: float
    trouble: str
    nodes: Sequence[NodeRow | SilentNode]
    coordinator: CoordinatorRow
    newest: NewestRow | None = None
    saves: Sequence[OpenAttempt] = ()
    aborted_in_a_row: int = 0
    failures: Sequence[FailedAttempt] = ()


def run_of(cluster: ClusterStatus, name: str) -> str:
    """Return the name of the coordinator to watch: ``name``, or the only one if that is empty, or that of the only running job.

    Raises:
        ClusterError: there is no such coordinator, or the cluster cannot be observed.
        StateError: ``name`` is empty and there are several.
    """
    if cluster.trouble:
        raise ClusterError(cluster.trouble)
    if named := [known for known in cluster.coordinators if name and (known == name or known.startswith(f"{name}-"))]:
        if len(named) > 1:  # jobs with other endpoints
            what = f"{len(named)} jobs save to this address in different stores on this cluster"
            raise StateError(what, remedy="end the other one, or use another address for it")
        return named[0]
    runs = sorted(status.uri for status in cluster.coordinators.values() if status is not None)
    if name or not cluster.coordinators:
        what = "no job saves to it on this cluster" if name else "no job saves with raystow on this cluster"
        raise ClusterError(what, remedy=f"jobs save to {', '.join(runs)}" if runs else "start a job with a Checkpointer")
    used = {uri for node in cluster.nodes.values() if node is not None for uri in node.ranks}
    running = [name for name, status in cluster.coordinators.items() if status is None or status.uri in used]
    if len(cluster.coordinators) > 1 and len(running) != 1:
        silent = len(cluster.coordinators) - len(runs)
        names = ", ".join(runs) + (f"{' and ' if runs else ''}{silent} whose coordinator does not answer" if silent else "")
        raise StateError(f"several jobs save on this cluster, or have saved: {names}", remedy="give the URI of one of them")
    return next(iter(running or cluster.coordinators))


def run_state(name: str, before: ClusterStatus, now: ClusterStatus, known: CoordinatorStatus | None) -> RunState:
    """Return the state of a run.

    Args:
        name: The name of its coordinator.
        before: The previous observation, for rates.
        now: The current observation.
        known: The last status of the coordinator; None if it has never answered.
    """
    uri = known.uri if known is not None else ""
    nodes = {id: status for id, status in now.nodes.items() if status is None or not uri or uri in status.ranks}
    state = RunState(
        uri=uri or None,
        at=round(now.at, 3),
        trouble=now.trouble,
        nodes=[_node(before.nodes.get(id), status, uri) if status else SilentNode(id) for id, status in nodes.items()],
        coordinator=CoordinatorRow(now.coordinators.get(name) is not None),
    )
    if known is None:
        return state
    return replace(
        state,
        coordinator=replace(state.coordinator, repository=known.repository, epoch=known.epoch),
        newest=_newest(known.newest, known.age) if known.newest is not None else None,
        saves=[structs.replace(save, age=round(save.age, 3), left=round(save.left, 3)) for save in known.attempts],
        aborted_in_a_row=known.aborted_in_a_row,
        failures=[structs.replace(failure, ago=round(failure.ago, 3)) for failure in known.failures],
    )


def _newest(entry: Entry, age: float | None) -> NewestRow:
    return NewestRow(
        entry.id, entry.step, entry.created, round(age or 0.0, 3), entry.raw, entry.stored, ratio(entry.stored, entry.raw)
    )


def _node(before: NodeStatus | None, now: NodeStatus, uri: str) -> NodeRow:
    coded, stored = now.raw, now.uploaded.get(uri, 0)
    coded_before, stored_before = (before.raw, before.uploaded.get(uri, 0)) if before is not None else (0, 0)
    seconds = now.at - before.at if before is not None else 0.0

    def rate(earlier: int, later: int) -> int | None:
        return round((later - earlier) / seconds) if seconds > 0 and later >= earlier else None

    return NodeRow(
        node=now.node,
        ranks=now.ranks.get(uri, 0),
        coded_per_second=rate(coded_before, coded),
        stored_per_second=rate(stored_before, stored),
        uploads=now.uploads,
        queue=now.queue,
        queue_limit=now.queue_limit,
        memory=now.memory,
        memory_limit=now.memory_limit,
        copies=now.copies,
        saves=now.attempts.get(uri, ()),
    )
