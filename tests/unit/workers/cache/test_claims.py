"""The node that reads each byte range from the store if several nodes request it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from raystow.workers.cache.pack_file import Span
from raystow.workers.cache.read_dedup import ReadClaims
from raystow.workers.protocol.messages import RestoreGroup

spans = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))


def test_a_range_is_claimed_by_the_first_node_that_requests_it():
    claims = ReadClaims()
    assert claims.claim("r", "pack", (10, 20), "a") == [(10, 20, "a")]
    assert claims.claim("r", "pack", (15, 25), "b") == [(15, 20, "a"), (20, 25, "b")]
    assert claims.claim("r", "pack", (0, 30), "c") == [(0, 10, "c"), (10, 20, "a"), (20, 25, "b"), (25, 30, "c")]
    assert claims.claim("r", "pack", (10, 20), "a") == [(10, 20, "a")]  # repeated, since an answer may be lost
    assert claims.claim("r", "other", (10, 20), "b") == [(10, 20, "b")]
    assert claims.claim("another restore", "pack", (10, 20), "b") == [(10, 20, "b")]


def test_a_lost_range_passes_to_the_node_that_reports_it():
    claims = ReadClaims()
    claims.claim("r", "pack", (0, 30), "a")
    assert claims.claim("r", "pack", (10, 20), "b", lost=["a"]) == [(10, 20, "b")]
    assert claims.claim("r", "pack", (0, 30), "c") == [(0, 10, "a"), (10, 20, "b"), (20, 30, "a")]


@given(st.lists(st.tuples(spans, st.sampled_from("abc")), max_size=12))
def test_every_byte_is_read_by_one_node(asked):
    claims, readers = ReadClaims(), Counter[int]()
    for span, node in asked:
        before = dict(readers)
        answer = claims.claim("r", "pack", span, node)
        assert covered(answer) == list(range(*span))
        for start, end, who in answer:
            if who == node:
                readers.update(i for i in range(start, end) if i not in before)
            else:
                assert all(i in before for i in range(start, end))
    assert set(readers.values()) <= {1}


def covered(answer: list[tuple[int, int, str]]) -> list[int]:
    parts: list[Span] = [(start, end) for start, end, _ in answer]
    return [i for start, end in parts for i in range(start, end)]


def test_claims_of_old_restores_are_removed():
    claims = ReadClaims()
    claims.claim("first", "pack", (0, 10), "a")
    for i in range(20):
        claims.claim(f"later {i}", "pack", (0, 10), "a")
    assert claims.claim("first", "pack", (0, 10), "b") == [(0, 10, "b")]


def test_each_object_has_an_owner_and_all_nodes_own_objects():
    group = RestoreGroup("r", ["a", "b", "c"])
    owners = Counter(group.owner(f"pack {i}") for i in range(300))
    assert owners.keys() == {"a", "b", "c"}
    assert min(owners.values()) > 50
    assert RestoreGroup("r", ["a"]).owner("pack") == RestoreGroup().owner("pack") == ""
