"""How far the steps that nodes have in memory lead after a version, without replaying any."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...workers.node.actor import journal_entries
from .. import ray_cluster
from ..journal.entry_plan import plan_entries


@dataclass(frozen=True)
class JournalReach:
    """What a replay would use.

    Args:
        step: The step that all ranks reach.
        entries: Entries of all ranks.
        bytes: Their sizes together.
        nodes: How many of them each node has in memory, by Ray's ids.
        end: Why later entries are not used; empty if there are none.
    """

    step: int
    entries: int
    bytes: int
    nodes: Mapping[str, int]
    end: str


def journal_reach(repository: str, base: int, world_size: int) -> JournalReach:
    """Ask the nodes of the Ray cluster that this machine belongs to; ``ClusterError`` if there is none.

    ``base``: the step of the version. Entries of another number of ranks count as if all optimizers acted element by element.
    """
    with ray_cluster.connected():
        plan = plan_entries(base, world_size, asyncio.run(journal_entries(repository)))
    places = [place for step in plan.steps for place in step]
    nodes = Counter(node for place in places for node in place.nodes)
    return JournalReach(plan.step, len(places), sum(place.info.size for place in places), dict(sorted(nodes.items())), plan.end)
