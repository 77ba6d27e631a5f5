"""The requests of this process that wait for a store, so that a command can say what it waits for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from ..runtime.clock import SYSTEM

_Item = TypeVar("_Item")


@dataclass(frozen=True, eq=False)
class Awaited:
    """A request without an answer.

    Attributes:
        operation: What the store is asked to do.
        subject: The address of the object concerned.
        server: The server's URL; "" for the provider's own.
        seconds: How long it takes at most if there is never an answer, all attempts included.
        begun: When it was first sent, by the monotonic clock.
    """

    operation: str
    subject: str
    server: str
    seconds: float
    begun: float = field(default_factory=SYSTEM.monotonic)


_requests: dict[Awaited, None] = {}  # in the order in which they began


@contextlib.contextmanager
def awaiting(request: Awaited) -> Iterator[None]:
    """Let ``oldest`` know of a request while the block waits for it."""
    _requests[request] = None
    try:
        yield
    finally:
        del _requests[request]


def oldest() -> Awaited | None:
    """Return the request that waits longest."""
    return next(iter(list(_requests)), None)


def each(items: Iterable[_Item], request: Callable[[], AbstractContextManager[None]]) -> Iterator[_Item]:
    """Yield ``items``, each got within a ``request()`` of its own: the time that a caller spends on one is not waited for."""
    rest = iter(items)
    while True:
        with request():
            found = [*itertools.islice(rest, 1)]
        if not found:
            return
        yield found[0]
