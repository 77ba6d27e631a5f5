"""The positions of the bytes of an object in memory that was lent in several parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.errors import ProtocolError
from raystow.workers.cache.lent_memory import LentMemory

PARTS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=6)


@given(parts=PARTS, data=st.data())
def test_spans_are_the_requested_bytes_in_order(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    lent = LentMemory(-1, tuple((at, at + size) for at, size in parts))
    places = [at + i for at, size in parts for i in range(size)]
    start = data.draw(st.integers(0, len(places)))
    length = data.draw(st.integers(0, len(places) - start))
    assert [at + i for at, size in lent.spans(start, length) for i in range(size)] == places[start : start + length]


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(ProtocolError, match="ends 2 bytes before"):
        list(LentMemory(-1, ((5, 9), (0, 3))).spans(4, 5))


def test_memory_of_one_part_starts_with_the_object() -> None:
    assert list(LentMemory(-1).spans(7, 3)) == [(7, 3)]
