"""Maps many items in threads, with a bounded amount of work submitted: ``Executor.map`` submits all of it at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST = 128  # items


def bounded_map(
    pool: Executor,
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    cost: Callable[[_Item], int] = lambda item: 0,
    limit: int = 0,
) -> Iterator[_Result]:
    """Yield the results in order. Items are taken as results are: the ``cost`` of those submitted is at most ``limit``, or they
    are a single one. An error, or the caller's end, cancels the rest."""
    submitted, used = deque[tuple[Future[_Result], int]](), 0
    try:
        for item in items:
            more = cost(item)
            while submitted and (used + more > limit or len(submitted) >= _MOST):
                first, freed = submitted.popleft()
                used -= freed
                yield first.result()
            submitted.append((pool.submit(function, item), more))
            used += more
        while submitted:
            yield submitted.popleft()[0].result()
    finally:
        for future, _ in submitted:
            future.cancel()
