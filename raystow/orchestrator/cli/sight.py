"""The facts behind ``raystow top``: what two snapshots of a cluster say of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...storage.errors import ClusterError, StateError
from ...workers.status import NodeStatus, Stage
from ..overview import Overview
from ..snapshot import Snapshot
from .present import ratio


def run_of(snapshot: Snapshot, name: str) -> str:
    """The coordinator to look at: ``name``, or the only one there is if that is empty. ``ClusterError`` if it is not there."""
    if snapshot.trouble:
        raise ClusterError(snapshot.trouble)
    if name in snapshot.coordinators:
        return name
    runs = sorted(overview.uri for overview in snapshot.coordinators.values() if overview is not None)
    if name or not snapshot.coordinators:
        what = "nobody saves to it on this cluster" if name else "no run saves by raystow on this cluster"
        raise ClusterError(what, remedy=f"there are {', '.join(runs)}" if runs else "the first Checkpointer begins a run")
    if len(snapshot.coordinators) > 1:
        silent = len(snapshot.coordinators) - len(runs)
        told = ", ".join(runs) + (f"{' and ' if runs else ''}{silent} whose coordinator does not answer" if silent else "")
        raise StateError(f"several runs save on this cluster: {told}", remedy="name one of them")
    return next(iter(snapshot.coordinators))


def facts(name: str, before: Snapshot, now: Snapshot, known: Overview | None) -> dict[str, Any]:
    """The JSON form of what is to be seen of the run of a coordinator. ``known``: what it said last, if it ever answered."""
    answers = now.coordinators.get(name) is not None
    nodes = {id: status for id, status in now.nodes.items() if status is None or known is None or known.uri in status.ranks}
    return {
        "uri": known.uri if known is not None else None,
        "at": round(now.at, 3),
        "trouble": now.trouble,
        "coordinator": {
            "answers": answers,
            "repository": known.repository if known is not None else None,
            "epoch": known.epoch if known is not None else None,
        },
        "newest": _newest(known),
        "saves": [_rounded(asdict(attempt)) for attempt in known.attempts] if known is not None else [],
        "aborted_in_a_row": known.aborted_in_a_row if known is not None else 0,
        "failures": [_rounded(asdict(failure)) for failure in known.failures] if known is not None else [],
        "nodes": [
            _node(id, before.nodes.get(id), status, known.uri if known is not None else "") for id, status in nodes.items()
        ],
    }


def _newest(known: Overview | None) -> dict[str, Any] | None:
    if known is None or known.newest is None:
        return None
    entry = known.newest
    sizes = {"raw": entry.raw, "stored": entry.stored, "ratio": ratio(entry.stored, entry.raw)}
    return {"id": entry.id, "step": entry.step, "created": entry.created, "age": round(known.age or 0.0, 3), **sizes}


def _node(id: str, before: NodeStatus | None, now: NodeStatus | None, uri: str) -> dict[str, Any]:
    if now is None:
        return {"node": id, "answers": False}
    seconds = now.at - before.at if before is not None else 0.0
    return {
        "node": id,
        "answers": True,
        "ranks": now.ranks.get(uri, 0),
        "coded_per_second": _rate(before.raw if before is not None else 0, now.raw, seconds),
        "stored_per_second": _rate(_uploaded(before, uri), _uploaded(now, uri), seconds),
        "uploads": now.uploads,
        "queue": now.queue,
        "queue_limit": now.queue_limit,
        "memory": now.memory,
        "memory_limit": now.memory_limit,
        "copies": {"wanted": now.copies.wanted, "present": now.copies.present, "partners": list(now.copies.partners)},
        "saves": [
            {
                "id": attempt.id,
                "attempt": attempt.attempt,
                "step": attempt.step,
                "ranks": {stage.value: _at(attempt.ranks, stage) for stage in Stage},
                "raw": attempt.raw,
                "coded": attempt.coded,
                "stored": attempt.stored,
            }
            for attempt in now.attempts
            if attempt.repository == uri
        ],
    }


def _at(ranks: Mapping[int, Stage], stage: Stage) -> list[int]:
    return [rank for rank, reached in ranks.items() if reached is stage]


def _uploaded(status: NodeStatus | None, uri: str) -> int:
    return status.uploaded.get(uri, 0) if status is not None else 0


def _rate(before: int, now: int, seconds: float) -> int | None:
    """Bytes a second; None if there was no look before, or the node worker was restarted since."""
    return round((now - before) / seconds) if seconds > 0 and now >= before else None


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
