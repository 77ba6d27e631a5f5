"""Ends requests of obstore whose answers seem to have no end.

obstore reads the body of an error to its end, whatever its size, and has limits of time only. So its call is asynchronous here,
and is cancelled when it has no result for a while and the memory of this process has grown meanwhile. The memory may be that
of something else, so the caller sends the request in another way then.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TypeVar

from ..runtime import background

_Result = TypeVar("_Result")
_PAUSE = 0.05


class EndlessAnswer(Exception):
    """The request was cancelled. No user sees this."""


def result_of(call: Callable[[], Awaitable[_Result]], *, patience: float, growth: int) -> _Result:
    """Return the result of an asynchronous call.

    Args:
        call: Starts the call, on a thread with an event loop.
        patience: Seconds during which memory may grow without limit.
        growth: Bytes by which this process may have grown after that, before the call is cancelled.

    Returns:
        What the call returns.

    Raises:
        EndlessAnswer: The process has grown by more.
    """

    async def awaited() -> _Result:
        return await call()

    before, pause = _resident(), patience
    future = asyncio.run_coroutine_threadsafe(awaited(), _loop())
    try:
        while not wait([future], pause).done:
            if _resident() - before > growth:
                raise EndlessAnswer
            pause = _PAUSE
        return future.result()
    finally:
        future.cancel()  # does nothing if it is done


def _resident() -> int:
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of a thread for all of these calls. A forked process never comes here: see ``forks``."""
    loop = asyncio.new_event_loop()
    background.start("raystow-requests", loop.run_forever)
    return loop
