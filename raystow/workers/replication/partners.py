"""Chooses the nodes that keep copies of a node's objects. A pure function: every node computes the same from the same nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...storage.coding.digest import stored_digest


def partners(zones: Mapping[str, str], replicas: int) -> dict[str, tuple[str, ...]]:
    """Node -> the ``replicas`` others that keep its copies, fewer if there are not enough. ``zones``: node -> failure domain.

    Nodes form a ring, in the order of a hash of their names. Each takes the next ones: first of zones that neither it nor its
    other partners are in, then of any other zone, then of its own. A node that serves twice its share is skipped while there are
    others, so that adjacent nodes of one zone do not all choose the same node. When a node joins or leaves, few partners change.
    """
    ring = sorted(zones, key=lambda node: stored_digest(node.encode()))
    domains = set(zones.values())
    serving: Counter[str] = Counter()

    def choose(others: list[str], avoided: set[str]) -> str | None:
        if avoided >= domains:
            return None
        able = [other for other in others if zones[other] not in avoided] if avoided else others
        free = next((other for other in able if serving[other] < 2 * replicas), None)
        return free or min(able, key=serving.__getitem__, default=None)

    chosen = {}
    for place, node in enumerate(ring):
        others, taken = [*ring[place + 1 :], *ring[:place]], list[str]()
        while others and len(taken) < replicas:
            domain = {zones[node]}
            partner = choose(others, domain | {zones[one] for one in taken}) or choose(others, domain) or choose(others, set())
            assert partner is not None  # there are others
            others.remove(partner)
            serving[partner] += 1
            taken.append(partner)
        chosen[node] = tuple(taken)
    return chosen
