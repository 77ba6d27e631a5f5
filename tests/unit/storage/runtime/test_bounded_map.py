"""Threads get no more work than the limit allows, and results come in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raystow.storage.runtime.bounded_map import bounded_map


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_results_of_a_bounded_map_come_in_order(pool: ThreadPoolExecutor) -> None:
    assert list(bounded_map(pool, lambda item: item * item, range(300))) == [item * item for item in range(300)]


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (1, 1), (0, 1)])
def test_items_beyond_the_limit_are_not_taken(pool: ThreadPoolExecutor, limit: int, most: int) -> None:
    taken = list[int]()

    def items() -> Iterator[int]:
        for item in range(10):
            taken.append(item)
            yield item

    results = bounded_map(pool, lambda item: item, items(), cost=lambda item: 1, limit=limit)
    for done in range(1, 6):
        next(results)
        assert len(taken) == most + done  # the last one was taken, and waits


def test_an_error_of_a_bounded_map_cancels_the_rest() -> None:
    begun, go = list[int](), threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        assert go.wait(30)
        raise ValueError(item)

    with ThreadPoolExecutor(1) as pool:
        results = bounded_map(pool, work, range(100))
        threading.Thread(target=go.set).start()
        with pytest.raises(ValueError, match="0"):
            next(results)
    assert len(begun) < 100
