"""Ends a command at a signal, or when its output has no reader: it cleans up if it can, and ends in any case.

Python raises ``KeyboardInterrupt`` between any two instructions of the main thread, also where it has just taken a lock, which
nobody releases then. Cleaning up may wait for such a lock, or for a store that does not answer.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import NoReturn

import typer

from ..storage.runtime import background
from ..storage.runtime.clock import SYSTEM

_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_CLEANING = 30.0  # seconds
_ONE_EVENT = 1.0  # seconds; ``timeout`` and a closed terminal send their signal twice
_SAYING = 10.0  # seconds; stderr may block
_said = threading.Event()


def interruptible() -> None:
    """Let the first signal raise ``KeyboardInterrupt`` in the main thread. A second one, or 30 s, end the process with 130."""
    received, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)  # is written to even while the main thread is blocked
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    background.start("raystow-signals", _end_late, received)


def say_interrupted() -> None:
    """Print that the command was interrupted."""
    _said.set()
    typer.echo("interrupted", err=True)


def end_by_closed_pipe() -> NoReturn:
    """End this process as SIGPIPE ends other tools, because the reader of its output has closed it.

    Python ignores SIGPIPE, and must: it would also be sent for a connection that a server has closed.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)  # the signal is blocked, or this is the first process of a container


def _interrupt(number: int, frame: object) -> None:
    for each in _SIGNALS:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, lambda number, frame: None)  # a second exception would end the cleaning up
    raise KeyboardInterrupt


def _end_late(received: int) -> None:
    """End the process some time after its first signal."""
    _arrives(received, None)
    SYSTEM.sleep(_ONE_EVENT)
    _arrives(received, 0)
    _arrives(received, _CLEANING)
    try:
        if not _said.is_set():  # else the process hangs at its exit, for example in a thread of a pool
            background.start("raystow-interrupted", say_interrupted).join(_SAYING)
    finally:
        os._exit(130)


def _arrives(received: int, seconds: float | None) -> bool:
    """Wait for a signal; None: without limit."""
    while select.select([received], [], [], seconds)[0]:
        if {*os.read(received, 64)} & {*_SIGNALS}:
            return True
    return False
