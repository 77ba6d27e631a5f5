"""Chooses the entries to replay after a version: the newest step that all ranks have recorded, in one line of history."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import STORE, EntryInfo, EntryPlace, Generation, generation_of

_MOST_GENERATIONS = 64
"""Generations that entries name: a training that restarted more often without a version has other problems."""


class EntryPlan(NamedTuple):
    """How far all ranks can go.

    Args:
        step: The newest step that can be reached.
        lineage: The generations of the entries.
        steps: The entries of all ranks that have recorded a step, by rank; oldest step first.
        end: Why later entries are not used; empty if there are none.
        newest: The newest generation that was found.
    """

    step: int
    lineage: tuple[Generation, ...] = ()
    steps: tuple[tuple[EntryPlace, ...], ...] = ()
    end: str = ""
    newest: Generation | None = None

    def entries(self, rank: int, world_size: int) -> Iterator[EntryPlace]:
        """The entries that one of ``world_size`` ranks needs, oldest first: its own, or those of all ranks that have recorded a
        step if they were another number, those that probably have its shards first."""
        for places in self.steps:
            recorded = len(places)
            if recorded == world_size:
                yield places[rank]
            else:
                yield from sorted(places, key=lambda one: abs((2 * one.info.rank + 1) * world_size - (2 * rank + 1) * recorded))


def plan_entries(
    base: int, world_size: int, held: Mapping[str, Sequence[EntryInfo]], fixed: str = "", *, rollbacks: int = 0
) -> EntryPlan:
    """Choose among the entries that nodes have in memory.

    The newest generation that can be reached counts: what an earlier one has recorded after its beginning are steps that were
    repeated. Generations that began before a rollback do not count, unless the store has them: a rollback removes them there, and
    a replica of the repository has had other rollbacks.

    Args:
        base: The step of the version that the entries must follow.
        world_size: The number of ranks that replay them.
        held: The entries that each node has.
        fixed: Why entries of another number of ranks cannot be used; empty if they can.
        rollbacks: How many the repository has had.
    """
    nodes: dict[EntryInfo, list[str]] = {}
    for node, infos in held.items():
        for info in infos:
            if info.step > base:
                nodes.setdefault(info, []).append(node)
    stored = {info.generation for info in held.get(STORE, ())}
    end, newest = "", max((info.generation for info in nodes), default=None)
    for lineage in sorted({info.lineage for info in nodes}, key=lambda lineage: lineage[-1], reverse=True):
        if lineage[-1] not in stored and lineage[-1].rollbacks < rollbacks:
            end = end or f"the steps after {base} were recorded before a rollback"
            continue
        plan = _follow(base, world_size, lineage, nodes, fixed)
        if plan.step > base:
            return plan._replace(newest=newest)
        end = end or plan.end
    return EntryPlan(base, end=end, newest=newest)


def continued(plan: EntryPlan, base: int, step: int, clock: Clock, rollbacks: int = 0) -> tuple[Generation, ...]:
    """The lineage of entries recorded from ``step`` on, as a new generation. ``base``: the newest version. ``rollbacks``: see
    ``plan_entries``."""
    before = [generation for generation in plan.lineage if generation.first <= step]
    pairs = itertools.zip_longest(before, before[1:])
    needed = [generation for generation, following in pairs if following is None or following.first > base + 1]
    return *needed[-_MOST_GENERATIONS:], Generation.begun(step + 1, clock, after=plan.newest, rollbacks=rollbacks)


def _follow(
    base: int, world_size: int, lineage: tuple[Generation, ...], nodes: Mapping[EntryInfo, Sequence[str]], fixed: str
) -> EntryPlan:
    """Follow a lineage from the base as far as every rank has the next entry."""
    following: dict[int, dict[int, EntryInfo]] = {}  # previous step -> rank -> entry
    for info in nodes:
        if info.generation == generation_of(lineage, info.step):
            following.setdefault(info.previous, {})[info.rank] = info
    step, chosen, end = base, list[tuple[EntryPlace, ...]](), ""
    while found := following.get(step):
        recorded, following_step = next((info.world_size, info.step) for info in found.values())
        missing = [rank for rank in range(recorded) if rank not in found]
        if missing:
            end = f"no node has the entries of step {following_step} of ranks {missing[:8]}"
        elif len({info.step for info in found.values()}) > 1:
            end = f"ranks have recorded different steps after step {step}"
        elif fixed and recorded != world_size:
            end = f"steps recorded by {recorded} ranks cannot be replayed by {world_size}: {fixed}"
        if end:
            break
        chosen.append(tuple(EntryPlace(found[rank], tuple(sorted(nodes[found[rank]]))) for rank in range(recorded)))
        step = following_step
    if not end and any(previous > step for previous in following):
        end = f"no node has entries of the step after {step}"
    return EntryPlan(step, lineage, tuple(chosen), end)
