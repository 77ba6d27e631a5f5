"""The states that training processes of this node have staged for other replicas: at most one for each process.

A state outlives its process for a while, so that a replica that reads it then still gets all of it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ...storage import background
from ...storage.errors import DeadlineExceeded
from ..protocol.messages import STAGED, DropState, MapState, ObjectState, OpenStates, StageState, StateRoom, StateStaged
from ..protocol.unix_channel import Connection
from ..shm.anonymous_memory import AnonymousMemory

_WAIT = 5.0  # seconds that a process waits for a state; then it is told that it is not staged yet


@dataclass
class _Sender:
    """``content``: of the memory. ``staged``: how many of the first bytes are there."""

    step: int = -1
    memory: AnonymousMemory | None = None
    content: memoryview | None = None
    staged: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return self.memory is not None and self.staged >= self.memory.size


class StagedStates:
    """Thread-safe. ``budget``: bytes of all states together."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._senders: dict[str, _Sender] = {}

    def serve(self, connection: Connection, opening: OpenStates) -> None:
        """Handle the messages of a training process until it goes away."""
        sender = _Sender()
        with self._changed:
            if (before := self._senders.get(opening.sender)) is not None:
                self._release(before)
            self._senders[opening.sender] = sender
        try:
            while (received := connection.receive(StageState, StateStaged, DropState, MapState)) is not None:
                message, descriptor = received
                match message:
                    case StageState() if descriptor is not None:
                        memory = AnonymousMemory.received(descriptor, message.size)
                        connection.send(StateRoom(self._announce(sender, message, memory)))
                    case StateStaged(size):
                        with self._changed:
                            sender.staged = size
                            self._changed.notify_all()
                    case DropState():
                        with self._changed:
                            self._release(sender)
                    case MapState(key, staged):
                        self._answer(connection, key, staged)
        finally:
            if sender.complete:
                background.after(sender.seconds, "raystow-states", lambda: self._forget(opening.sender, sender))
            else:
                self._forget(opening.sender, sender)

    def read(self, key: str, span: tuple[int, int], seconds: float) -> memoryview | None:
        """Return the bytes of ``span`` of a state, fewer at its end; None if they will not come. They stay valid.

        Raises:
            DeadlineExceeded: They may still come, but have not within ``seconds``.
        """
        with self._changed:
            sender = self._await(key, span, seconds)
            return None if sender is None or sender.content is None else sender.content[slice(*span)]

    @property
    def used(self) -> bool:
        """Whether a state is here."""
        with self._changed:
            return any(sender.memory is not None for sender in self._senders.values())

    def close(self) -> None:
        """Drop everything. Memory that was lent stays valid for its readers."""
        with self._changed:
            for sender in self._senders.values():
                self._release(sender)

    def _answer(self, connection: Connection, key: str, staged: int) -> None:
        try:
            with self._changed:
                sender = self._await(key, (staged, staged), _WAIT)
                descriptor = None if sender is None or sender.memory is None else sender.memory.lend()
        except DeadlineExceeded:
            connection.send(ObjectState("pending"))
            return
        if descriptor is None:
            connection.send(ObjectState("absent"))
            return
        try:
            connection.send(ObjectState("present"), fd=descriptor)
        finally:
            os.close(descriptor)

    def _await(self, key: str, span: tuple[int, int], seconds: float) -> _Sender | None:
        """Return the sender whose memory has these bytes; None if they will not come."""
        name, _, number = key.removeprefix(STAGED).rpartition("/")
        step = int(number) if number.isdecimal() else -1
        self._changed.wait_for(lambda: not self._may_come(name, step, span), seconds)
        if self._may_come(name, step, span):
            raise DeadlineExceeded(f"not staged after {seconds:.0f} s", subject=key)
        sender = self._senders.get(name)
        return None if sender is None or sender.memory is None or sender.step != step else sender

    def _may_come(self, name: str, step: int, span: tuple[int, int]) -> bool:
        """Whether a living sender has no state of this step yet, nor of a later one, or not these bytes of it. A request for
        later bytes follows a read of the first ones, so a state without memory has been dropped by then."""
        sender = self._senders.get(name)
        if sender is None or sender.step != step:
            return sender is not None and sender.step < step
        if sender.memory is None:
            return span[0] == 0
        return sender.staged < min(sender.memory.size, span[1])

    def _announce(self, sender: _Sender, message: StageState, memory: AnonymousMemory) -> str:
        with self._changed:
            self._release(sender)
            used = sum(other.memory.size for other in self._senders.values() if other.memory is not None)
            if used + message.size > self._budget:
                memory.close()
                return f"{message.size} bytes do not fit into {self._budget}, of which {used} are used"
            sender.step, sender.memory, sender.seconds = message.step, memory, max(0.0, message.seconds)
            sender.content = memory.content
            self._changed.notify_all()
        return ""

    def _forget(self, name: str, sender: _Sender) -> None:
        with self._changed:
            self._release(sender)
            if self._senders.get(name) is sender:
                del self._senders[name]
            self._changed.notify_all()

    def _release(self, sender: _Sender) -> None:
        memory, sender.memory, sender.content, sender.staged = sender.memory, None, None, 0
        if memory is not None:
            memory.close()
            self._changed.notify_all()
