from __future__ import annotations

from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.workers.gpu.encode.arena import Arena

UNIT = 512


@settings(max_examples=300, deadline=None)
@given(
    units=st.integers(1, 24),
    steps=st.lists(st.one_of(st.just(None), st.integers(0, 9 * UNIT)), max_size=120),
)
def test_regions_never_overlap_and_are_freed_in_order(units: int, steps: list[int | None]) -> None:
    """A step of ``None`` returns the oldest region; a number takes a region of that many bytes."""
    arena = Arena(torch.empty(units * UNIT, dtype=torch.uint8))
    taken: deque[tuple[int, int]] = deque()
    for nbytes in steps:
        if nbytes is None:
            if taken:
                taken.popleft()
                arena.give_back()
            continue
        need = max(1, -(-nbytes // UNIT)) * UNIT
        start = arena.take(nbytes)
        if start is None:
            assert not has_room(taken, need, arena.size)
        else:
            assert start % UNIT == 0
            assert 0 <= start <= start + need <= arena.size
            assert all(end <= start or start + need <= other for other, end in taken)
            taken.append((start, start + need))


def has_room(taken: deque[tuple[int, int]], need: int, size: int) -> bool:
    """Return whether the circular buffer has space after its newest region. One byte before the oldest region must stay free."""
    if not taken:
        return need <= size
    head, tail = taken[0][0], taken[-1][1]
    return tail + need < head if tail <= head else tail + need <= size or need < head


@settings(max_examples=50, deadline=None)
@given(units=st.integers(1, 24), sizes=st.lists(st.integers(0, 9 * UNIT), max_size=30), clear=st.booleans())
def test_an_empty_arena_can_be_taken_whole(units: int, sizes: list[int], clear: bool) -> None:
    arena = Arena(torch.empty(units * UNIT, dtype=torch.uint8))
    taken = [nbytes for nbytes in sizes if arena.take(nbytes) is not None]
    if clear:
        arena.clear()
    else:
        for _ in taken:
            arena.give_back()
    assert arena.take(arena.size) == 0
    assert arena.take(1) is None
    arena.give_back()
    assert arena.take(arena.size + 1) is None
