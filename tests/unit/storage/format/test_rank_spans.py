"""Sets of ranks as spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.format.rank_spans import RankSet, ranks_text


@given(st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=6))
def test_a_set_of_ranks_has_the_ranks_that_were_added(parts: list[list[int]]) -> None:
    found, expected = RankSet(), set[int]()
    for part in parts:
        found.add(part)
        expected.update(part)
        assert [*found] == sorted(expected)
    assert all(first < end for first, end in found.spans)
    assert all(end < after for (_, end), (after, _) in zip(found.spans, found.spans[1:], strict=False))
    again = RankSet()
    again.add(sorted(expected, reverse=True))
    assert again == found


def test_the_ranks_of_all_nodes_are_one_span() -> None:
    found = RankSet()
    for node in (2, 0, 1):
        found.add(range(node, 3000, 3))
    assert found.ends == [0, 3000]
    assert ranks_text(found) == "ranks 0-2999"
