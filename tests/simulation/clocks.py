"""The clock of a simulated process, and replacements of ``threading`` classes that run on greenlets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from .random_source import RandomSource
from .scheduler import Process, current

EPOCH = 1_700_000_000.0
"""Time of the store at the start of a world, in seconds since 1970."""


class SimClock:
    """A ``Clock`` whose wall clock differs by ``offset`` seconds, which may change at any time."""

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


class ThreadClock:
    """The part of a ``Clock`` that loops in the background use, of the process that they belong to."""

    def sleep(self, seconds: float) -> None:
        current().process.scheduler.pause(seconds)


class Event:
    """The part of ``threading.Event`` that raystow uses."""

    def __init__(self) -> None:
        self._set, self._process = False, current().process

    def set(self) -> None:
        self._set = True
        self._process.tell()

    def wait(self, timeout: float) -> bool:
        return self._process.wait(lambda: self._set, timeout)


class Thread:
    """The part of ``threading.Thread`` that raystow uses; a thread is a task of the process."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        current().process.spawn(self._target)


class Serially:
    """A ``ThreadPoolExecutor`` that runs its work serially."""

    def __init__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        """Do nothing: no work is pending."""

    def __enter__(self) -> Serially:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass
