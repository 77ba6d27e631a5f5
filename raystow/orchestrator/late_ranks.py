"""Warnings of ranks that others wait for, long before a save or restore is given up."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..storage.format.parts import name_of
from ..storage.format.rank_spans import LISTED, ranks_text
from ..workers.protocol.messages.incarnation import Incarnation

LATE = 30.0
"""Seconds after which a rank that others wait for is named in a warning."""


def next_warning(now: float, since: float) -> float:
    """When to warn again, after a warning now of what has lasted ``since`` then: each takes twice as long as the one before."""
    return now + max(LATE, now - since)


def with_processes(ranks: Collection[int], member: Callable[[int], Incarnation | None]) -> str:
    """Name ranks and their processes: ``rank 3 (process 812 on host)``. ``member``: the process of a rank, if it has started."""
    listed = sorted(ranks)[:LISTED]
    members = [member(rank) for rank in listed]
    processes = ["not started" if one is None else one.process for one in members]
    if len(listed) == 1:
        return f"{ranks_text(ranks)} ({processes[0]})"
    named = "; ".join(f"{name_of(rank) or rank}: {process}" for rank, process in zip(listed, processes, strict=True))
    return f"{ranks_text(ranks)} ({named}{'; ...' if len(ranks) > len(listed) else ''})"


def late_text(late: Collection[int], waiting: Collection[int], what: str, member: Callable[[int], Incarnation | None]) -> str:
    """The warning that some ranks wait for others. ``what``: what these have not done, and for how long."""
    waits = "waits" if len(waiting) == 1 else "wait"
    return f"{with_processes(late, member)} {'has' if len(late) == 1 else 'have'} {what}; {ranks_text(waiting)} {waits}"
