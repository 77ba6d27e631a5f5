"""Reads the bytes of a state from the memory of the sender's node."""

from __future__ import annotations

import threading

from ...storage import background
from ...storage.clock import SYSTEM
from ...storage.errors import ClusterError, DeadlineExceeded, ProtocolError
from ..protocol.messages import Contact, ObjectState, ReadObject, state_key
from ..protocol.tcp_channel import TcpChannel
from .state_client import absent


class StateReader:
    """Thread-safe; each thread uses a connection of its own. ``seconds``: within which everything must have been read."""

    def __init__(self, contact: Contact, sender: str, step: int, seconds: float) -> None:
        self._contact, self._key, self._step, self._seconds = contact, state_key(sender, step), step, seconds
        self._end = SYSTEM.monotonic() + seconds
        self._lock = threading.Lock()
        self._idle, self._open = list[TcpChannel](), set[TcpChannel]()
        self._closed = False
        self._timer = background.after(max(0.0, seconds), "raystow-states", self.close)

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``start``; waits until they are staged.

        Raises:
            ClusterError: The sender is gone, or its node is.
            DeadlineExceeded: The time is over.
        """
        try:
            while (state := self._ask(start, target)) == "pending":
                pass
        except (OSError, ProtocolError) as error:
            self._check_time(error)
            raise ClusterError(f"its node does not answer: {error}", subject="the sender of the state") from error
        if state != "present":
            raise absent(self._step)

    def close(self) -> None:
        """End all reads."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            for channel in self._open:
                channel.shut()  # the thread that uses it closes it
            for channel in self._idle:
                channel.close()

    def _ask(self, start: int, target: memoryview) -> str:
        channel = self._take()
        try:
            channel.send(ReadObject("", self._key, start, target.nbytes))
            state = channel.receive(ObjectState).state
            if state == "present":
                channel.receive_into(target)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._idle.append(channel)
        return state

    def _take(self) -> TcpChannel:
        self._check_time(None)
        with self._lock:
            if self._idle:
                return self._idle.pop()
        channel = TcpChannel.connect(self._contact)
        with self._lock:
            self._open.add(channel)
            closed = self._closed
        if closed:
            channel.shut()
        return channel

    def _check_time(self, cause: Exception | None) -> None:
        if SYSTEM.monotonic() >= self._end:
            what = f"timed out: the state of step {self._step} did not come within {self._seconds:.1f} s"
            raise DeadlineExceeded(what, remedy="raise the timeout, or check that the sender is alive") from cause
