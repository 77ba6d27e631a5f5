"""A training process's connection to its node worker: it stages states, and maps those that others of the node have staged."""

from __future__ import annotations

import logging
import mmap
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...storage import background
from ...storage.clock import SYSTEM
from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError, DeadlineExceeded
from ..protocol.messages import DropState, MapState, ObjectState, OpenStates, StageState, StateRoom, StateStaged, state_key
from ..protocol.unix_channel import Connection
from ..shm.anonymous_memory import AnonymousMemory

logger = logging.getLogger(__name__)


def absent(step: int) -> ClusterError:
    """Return the error of a state that will not come."""
    return ClusterError(f"has died, or has no state of step {step} any more", subject="the sender of the state")


@dataclass(frozen=True)
class MappedState:
    """``content``: the memory of a state; changes to it are private. ``wait`` returns when so many of its first bytes are there,
    and raises the same errors as ``StateClient.map``."""

    content: Bytes
    wait: Callable[[int], None]


class StateClient:
    """Stages one state at a time, or maps one. ``lost``: the node worker is gone."""

    def __init__(self, address: str, name: str) -> None:
        self._connection = Connection.connect(address)
        self._connection.send(OpenStates(name))
        self._answers: queue.SimpleQueue[tuple[StateRoom | ObjectState, int | None] | None] = queue.SimpleQueue()
        self.lost = False
        self._thread = background.start("raystow-states", self._listen)

    def stage(self, step: int, size: int, seconds: float, fill: Callable[[int, Callable[[int], None]], None]) -> None:
        """Hand over the state of a step. ``fill`` writes its ``size`` bytes to the descriptor that it is called with, and may say
        how many of the first bytes are written: other nodes read these then.

        Raises:
            ClusterError: The node worker is gone, or has no memory for the state.
            DeadlineExceeded: The node worker has not answered within ``seconds``.
        """
        memory = AnonymousMemory.empty(size)
        try:
            self._connection.send(StageState(step, size, seconds), fd=memory.descriptor)
            self._check_room(step, seconds)
            fill(memory.descriptor, self._staged)
            self._staged(size)
        except BaseException:
            self.drop()
            raise
        finally:
            memory.close()

    def drop(self) -> None:
        """Free the memory of the state; replicas that are reading it lose it."""
        if not self.lost:
            try:
                self._connection.send(DropState())
            except ClusterError as error:
                logger.debug("a state is not dropped: %s", error)

    def close(self) -> None:
        """Drop the state and close the connection."""
        self.drop()
        self._connection.close()
        self._thread.join()

    def map(self, sender: str, step: int, seconds: float) -> MappedState:
        """Return the memory of a state as soon as a process of this node begins to stage it.

        Raises:
            ClusterError: The sender is gone, or the node worker is.
            DeadlineExceeded: The time is over.
        """
        end = SYSTEM.monotonic() + seconds

        def lent(staged: int) -> int:
            state, descriptor = "pending", None
            while state == "pending":
                self._connection.send(MapState(state_key(sender, step), staged))
                answer, descriptor = self._await(f"the state of step {step} did not come within {seconds:.1f} s", end)
                state = answer.state if isinstance(answer, ObjectState) else "absent"
            if descriptor is None:
                raise absent(step)
            return descriptor

        descriptor = lent(0)
        try:
            flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            content = np.frombuffer(mmap.mmap(descriptor, 0, flags, access), np.uint8)
        finally:
            os.close(descriptor)
        return MappedState(content, lambda staged: os.close(lent(staged)))

    def _staged(self, size: int) -> None:
        self._connection.send(StateStaged(size))

    def _check_room(self, step: int, seconds: float) -> None:
        answer, _ = self._await(f"the node worker did not answer within {seconds:.1f} s", SYSTEM.monotonic() + seconds)
        if isinstance(answer, StateRoom) and answer.problem:
            remedy = "give the node more memory, or send from fewer processes of a node"
            raise ClusterError(f"cannot be staged: {answer.problem}", subject=f"the state of step {step}", remedy=remedy)

    def _await(self, what: str, end: float) -> tuple[StateRoom | ObjectState, int | None]:
        try:
            answer = self._answers.get(timeout=max(0.0, end - SYSTEM.monotonic()))
        except queue.Empty:
            self.lost = True  # the answer may still come, and is to no other question
            self._connection.shut()
            raise DeadlineExceeded(f"timed out: {what}", remedy="raise the timeout, or check that the sender is alive") from None
        if answer is None:
            raise ClusterError("died", subject="the node worker")
        return answer

    def _listen(self) -> None:
        try:
            received: tuple[StateRoom | ObjectState, int | None] | None
            while (received := self._connection.receive(StateRoom, ObjectState)) is not None:
                self._answers.put(received)
        finally:
            self.lost = True
            self._connection.shut()
            self._answers.put(None)
