"""The assignment of partner nodes, which keep copies of a node's data."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from raystow.workers.replication.partners import partners

NAMES = st.lists(st.integers(0, 1 << 64).map("node-{:x}".format), unique=True, max_size=40)
ZONED = NAMES.flatmap(lambda names: st.fixed_dictionaries({name: st.sampled_from("abcd") for name in names}))


def serving(chosen: dict[str, tuple[str, ...]]) -> Counter[str]:
    return Counter(partner for partners in chosen.values() for partner in partners)


@given(ZONED, st.integers(0, 4))
def test_each_node_has_as_many_partners_as_possible(zones, replicas):
    chosen = partners(zones, replicas)
    assert chosen.keys() == zones.keys()
    for node, others in chosen.items():
        assert len({*others} - {node}) == len(others) == min(replicas, len(zones) - 1)


@given(ZONED, st.integers(1, 4))
def test_partners_are_in_as_many_zones_as_possible(zones, replicas):
    for node, others in partners(zones, replicas).items():
        assert len({zones[other] for other in (node, *others)}) == min(len(others) + 1, len(set(zones.values())))


@given(NAMES, st.integers(1, 3))
def test_without_zones_each_node_serves_equally_many(names, replicas):
    served = serving(partners(dict.fromkeys(names, ""), replicas))
    assert set(served.values()) <= {min(replicas, len(names) - 1)}


@given(st.integers(1, 10), st.integers(2, 4), st.integers(1, 3), st.integers())
def test_with_equal_zones_load_is_at_most_twice_the_share(nodes, zones, replicas, salt):
    chosen = partners({f"{salt}-{i}": str(i % zones) for i in range(nodes * zones)}, replicas)
    assert max(serving(chosen).values()) <= 2 * replicas


@given(NAMES.filter(bool), st.integers(1, 3), st.data())
def test_a_lost_node_is_replaced_only_for_nodes_it_served(names, replicas, data):
    gone = data.draw(st.sampled_from(names))
    before = partners(dict.fromkeys(names, ""), replicas)
    after = partners(dict.fromkeys(set(names) - {gone}, ""), replicas)
    assert {node for node in after if after[node] != before[node]} <= {node for node in before if gone in before[node]}
    assert all({*before[node]} - {gone} <= {*after[node]} for node in after)


def test_with_zones_a_lost_node_changes_few_partners():
    zones = {f"node-{i}": str(i % 4) for i in range(200)}
    before = partners(zones, 1)
    changed = []
    for gone in list(zones)[::10]:
        after = partners({node: zone for node, zone in zones.items() if node != gone}, 1)
        changed.append(sum(after[node] != before[node] for node in after))
    assert sum(changed) <= 3 * len(changed)
