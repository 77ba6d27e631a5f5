"""Chooses the entries to replay after a version: the newest step that all ranks have recorded, in one line of history."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...storage.clock import Clock
from ...workers.protocol.messages import EntryInfo, EntryPlace, Generation, generation_of

_MOST_GENERATIONS = 64
"""Generations that entries name: a training that restarted more often without a version has other problems."""


class EntryPlan(NamedTuple):
    """``step``: the one that all ranks can reach. ``lineage``: the generations of the entries. ``entries``: by rank, oldest
    first."""

    step: int
    lineage: tuple[Generation, ...]
    entries: Mapping[int, tuple[EntryPlace, ...]]
    note: str = ""


def plan_entries(base: int, world_size: int, held: Mapping[str, Sequence[EntryInfo]]) -> EntryPlan:
    """Choose among the entries that nodes have in memory; ``base``: the step of the version that they must follow.

    The newest generation that can be reached counts: what an earlier one has recorded after its beginning are steps that were
    repeated. Entries of another number of ranks are not used.
    """
    nodes: dict[EntryInfo, list[str]] = {}
    for node, infos in held.items():
        for info in infos:
            nodes.setdefault(info, []).append(node)
    usable = [info for info in nodes if info.world_size == world_size and info.step > base]
    others = sorted({info.world_size for info in nodes if info.world_size != world_size and info.step > base})
    if others and not usable:
        note = f"steps recorded by {', '.join(map(str, others))} ranks cannot be replayed by {world_size}"
        return EntryPlan(base, (), {}, note)
    for lineage in sorted({info.lineage for info in usable}, key=lambda lineage: lineage[-1].token, reverse=True):
        plan = _follow(base, world_size, lineage, nodes, usable)
        if plan.step > base:
            return plan
    return EntryPlan(base, (), {})


def continued(lineage: Sequence[Generation], base: int, step: int, clock: Clock) -> tuple[Generation, ...]:
    """The lineage of entries recorded from ``step`` on, as a new generation; ``base``: the newest version. Tokens of later
    generations sort after those of earlier ones."""
    before = [generation for generation in lineage if generation.first <= step]
    pairs = itertools.zip_longest(before, before[1:])
    needed = [generation for generation, following in pairs if following is None or following.first > base + 1]
    return *needed[-_MOST_GENERATIONS:], Generation(f"{int(clock.now() * 1000):013x}-{clock.token()}", step + 1)


def _follow(
    base: int,
    world_size: int,
    lineage: tuple[Generation, ...],
    nodes: Mapping[EntryInfo, Sequence[str]],
    usable: Sequence[EntryInfo],
) -> EntryPlan:
    """Follow a lineage from the base as far as every rank has the next entry."""
    following: dict[int, dict[int, EntryInfo]] = {rank: {} for rank in range(world_size)}  # rank -> previous step -> entry
    for info in usable:
        if info.rank in following and info.lineage[-1].token == generation_of(lineage, info.step):
            following[info.rank][info.previous] = info
    step, chosen = base, {rank: list[EntryPlace]() for rank in following}
    while True:
        entries = {rank: after.get(step) for rank, after in following.items()}
        steps = {None if info is None else info.step for info in entries.values()}
        if len(steps) != 1 or None in steps:
            return EntryPlan(step, lineage, {rank: tuple(places) for rank, places in chosen.items()})
        for rank, entry in entries.items():
            assert entry is not None
            chosen[rank].append(EntryPlace(entry, tuple(sorted(nodes[entry]))))
            step = entry.step
