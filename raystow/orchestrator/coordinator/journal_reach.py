"""How far the steps lead that nodes and the store have after a version, without replaying any."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...storage.commit.catalog import Catalog
from ...storage.errors import ClusterError
from ...storage.format.root import Root
from ...workers.node.actor import journal_entries
from ...workers.protocol.messages import STORE, EntryInfo
from .. import ray_cluster
from ..journal.entry_plan import plan_entries
from .segments import stored_entries


@dataclass(frozen=True)
class JournalReach:
    """What a replay would use.

    Args:
        step: The step that all ranks reach.
        entries: Entries of all ranks.
        bytes: Their sizes together.
        nodes: How many of them each node has in memory, by Ray's ids, and how many the store has, as "store".
        end: Why later entries are not used; empty if there are none.
        cluster: Whether nodes of a Ray cluster were asked.
        why_not: Why they were not; empty if they were.
    """

    step: int
    entries: int
    bytes: int
    nodes: Mapping[str, int]
    end: str
    cluster: bool
    why_not: str


def journal_reach(catalog: Catalog, root: Root, base: int, world_size: int) -> JournalReach:
    """Ask the store, and the nodes of the Ray cluster that this machine belongs to if there is one.

    ``base``: the step of the version. Entries of another number of ranks count as if all optimizers acted element by element.
    """
    held: dict[str, Sequence[EntryInfo]] = {STORE: tuple(stored_entries(catalog, root))}
    why_not = ""
    try:
        with ray_cluster.connected():
            held.update(asyncio.run(journal_entries(catalog.id)))
    except ClusterError as error:
        why_not = error.what
    plan = plan_entries(base, world_size, held, rollbacks=root.rollbacks)
    places = [place for step in plan.steps for place in step]
    nodes = Counter(node for place in places for node in place.nodes)
    nbytes = sum(place.info.size for place in places)
    return JournalReach(plan.step, len(places), nbytes, dict(sorted(nodes.items())), plan.end, not why_not, why_not)
