"""Threads in the background: an error in one of them is logged, counted, and ends neither a loop nor the process silently.

All threads of raystow are started here, except those of pools whose results are awaited.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from .clock import SYSTEM
from .metrics import THREAD_ERRORS, record

logger = logging.getLogger(__name__)

_PAUSE = 0.1  # seconds after an error in a loop: too many open files are not fewer at once
REMEMBERED = 100  # different errors of a loop that are not logged again


class ErrorLog:
    """Logs the errors of a thread, each once, and counts all of them in the metric ``raystow_thread_errors``."""

    def __init__(self, thread: str) -> None:
        self._thread, self._logged = thread, set[str]()

    def note(self, error: BaseException) -> None:
        """Log and count an error."""
        record(THREAD_ERRORS, thread=self._thread)
        text = repr(error)
        if text in self._logged or len(self._logged) >= REMEMBERED:
            return
        self._logged.add(text)
        what = "an error in the thread %s, which goes on; if it repeats, it is counted only: %s"
        logger.error(what, self._thread, text, exc_info=error)


def repeat(name: str, step: Callable[[], bool]) -> threading.Thread:
    """Call ``step`` on a daemon thread until it returns False. An error does not end the loop."""
    errors = ErrorLog(name)

    def run() -> None:
        more = True
        while more:
            try:
                more = step()
            except Exception as error:
                errors.note(error)
                SYSTEM.sleep(_PAUSE)

    return _started(threading.Thread(target=run, name=name, daemon=True))


def start(name: str, run: Callable[..., object], *args: object) -> threading.Thread:
    """Call ``run(*args)`` on a daemon thread. It ends what it serves by itself; an error that it raises is logged and counted."""
    return _started(threading.Thread(target=_noted, args=(name, run, *args), name=name, daemon=True))


def after(seconds: float, name: str, run: Callable[[], object]) -> threading.Timer:
    """Call ``run`` on a daemon thread after some seconds, unless the timer is cancelled before."""
    timer = threading.Timer(seconds, _noted, args=(name, run))
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def submit(pool: Executor, name: str, run: Callable[..., object], *args: object) -> None:
    """Call ``run(*args)`` on a thread of a pool whose result is not awaited."""
    pool.submit(_noted, name, run, *args)


def _started(thread: threading.Thread) -> threading.Thread:
    thread.start()
    return thread


def _noted(name: str, run: Callable[..., object], *args: object) -> None:
    try:
        run(*args)
    except Exception as error:
        ErrorLog(name).note(error)
