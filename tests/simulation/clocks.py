"""The clock of one simulated process, and threads that are greenlets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from .random_source import RandomSource
from .scheduler import Process, current

EPOCH = 1_700_000_000.0
"""The store's time when a world begins, in seconds since 1970."""


class SimClock:
    """``raystow.storage.clock.Clock``. ``offset``: how far the wall clock is off; it may change at any time."""

    def __init__(self, process: Process, rng: RandomSource) -> None:
        self._process, self._rng, self.offset = process, rng, 0.0

    def now(self) -> float:
        return EPOCH + self._process.scheduler.time + self.offset

    def monotonic(self) -> float:
        return self._process.scheduler.time

    def sleep(self, seconds: float) -> None:
        self._process.scheduler.pause(seconds)

    def token(self) -> str:
        return self._rng.token()


class Event:
    """``threading.Event``, as far as it is used."""

    def __init__(self) -> None:
        self._set, self._process = False, current().process

    def set(self) -> None:
        self._set = True
        self._process.tell()

    def wait(self, timeout: float) -> bool:
        return self._process.wait(lambda: self._set, timeout)


class Thread:
    """``threading.Thread``, as far as it is used: another task of the process."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        current().process.spawn(self._target)


class Serially:
    """``ThreadPoolExecutor``, one thing after the other."""

    def __init__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)

    def shutdown(self, **_: object) -> None:
        """Nothing waits."""

    def __enter__(self) -> Serially:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass
