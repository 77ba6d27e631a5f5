"""A training process's connection to the journal of its node."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

from ...storage import background
from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError, ProtocolError
from ...storage.log import about
from ...storage.object_store import Buffer
from ..protocol.messages import (
    EntryInfo,
    EntryKept,
    EntryPlace,
    EntryTaken,
    FetchedEntry,
    FetchEntry,
    KeepEntry,
    OpenJournal,
    SaveBegun,
    ShareMemory,
)
from ..protocol.unix_channel import Connection
from ..shm.anonymous_memory import AnonymousMemory
from .entry_bytes import SharedBuffer

logger = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds within which an entry must have been fetched
_TAKING = 10.0  # seconds within which the node worker must have copied an entry
_RECORDING = 2  # buffers for recorded entries: one is filled while the node copies the other
_DIED = "the node worker of this rank died"


class JournalClient:
    """One thread keeps entries, and one fetches them. ``ClusterError`` if the node worker is gone."""

    def __init__(self, address: str, opening: OpenJournal) -> None:
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self._connection = Connection.connect(address)
        self._connection.send(opening)
        self._changed = threading.Condition()
        self._waiting: dict[int, Callable[[EntryKept], None]] = {}
        self._fetched: queue.SimpleQueue[FetchedEntry | None] = queue.SimpleQueue()
        self._buffers: dict[int, SharedBuffer] = {}
        self._lent: dict[int, int] = {}  # by number of the buffer: the step of the entry in it
        self._begun, self.lost = 0, False
        self._thread = background.start("raystow-journal-answers", self._listen)

    def begin(self) -> Callable[[int], Bytes]:
        """Begin an entry; return a function that returns memory for so many bytes of it. Waits until the node has copied the
        entry that was there, the one before the last."""
        number = self._begun % _RECORDING
        with self._changed:
            taken = self._changed.wait_for(lambda: self.lost or number not in self._lent, _TAKING)
            if self.lost:
                raise ClusterError(_DIED)
            if not taken:
                raise ClusterError(f"the node worker has not copied the entry of step {self._lent[number]} in {_TAKING:.0f} s")
        self._begun += 1
        for other in [other for other in self._buffers if other >= _RECORDING]:  # of a replay
            self._buffers.pop(other).close()
        return self._buffer(number).take

    def keep(self, info: EntryInfo, parts: Sequence[Buffer], on_kept: Callable[[EntryKept], None]) -> None:
        """Hand over the entry that was begun. Parts that are not in its memory are copied there. ``on_kept`` is called from
        another thread."""
        number = (self._begun - 1) % _RECORDING
        if number not in self._buffers:
            raise ClusterError(_DIED)  # the entry was begun with that node worker
        spans = tuple(self._buffers[number].spans(parts))
        with self._changed:
            if self.lost:
                raise ClusterError(_DIED)
            self._waiting[info.step], self._lent[number] = on_kept, info.step
        try:
            self._connection.send(KeepEntry(info, number, spans))
        except ClusterError:
            with self._changed:
                self._waiting.pop(info.step, None)
            raise

    def save_begun(self, step: int) -> None:
        """Tell that a save of the state after a step is under way."""
        self._connection.send(SaveBegun(step))

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        """Return the bytes of an entry, which the node keeps from then on. They are valid until the next call with ``number``, or
        of ``begin``."""
        buffer = self._buffer(number)
        content = buffer.take(place.info.size).data.toreadonly()
        self._connection.send(FetchEntry(place, number))
        try:
            answer = self._fetched.get(timeout=_PATIENCE)
        except queue.Empty:
            raise ClusterError(f"no entry after {_PATIENCE:.0f} s", subject=f"entry of step {place.info.step}") from None
        if answer is None:
            self._fetched.put(None)
            raise ClusterError(_DIED)
        if answer.problem:
            raise ClusterError(f"is not in memory any more: {answer.problem}", subject=f"entry of step {place.info.step}")
        return content

    def close(self) -> None:
        """Close the connection; the node keeps the entries."""
        self._connection.close()
        self._thread.join()
        for buffer in self._buffers.values():
            buffer.close()

    def _buffer(self, number: int) -> SharedBuffer:
        if number not in self._buffers:
            self._buffers[number] = SharedBuffer(functools.partial(self._share, number))
        self._buffers[number].clear()
        return self._buffers[number]

    def _share(self, number: int, memory: AnonymousMemory) -> None:
        descriptor = memory.lend()
        try:
            self._connection.send(ShareMemory(number, memory.size), fd=descriptor)
        finally:
            os.close(descriptor)

    def _listen(self) -> None:
        try:
            received: tuple[EntryTaken | EntryKept | FetchedEntry, int | None] | None
            while (received := self._connection.receive(EntryTaken, EntryKept, FetchedEntry)) is not None:
                self._handle(received[0])
        except Exception as error:
            trace = not isinstance(error, ProtocolError)
            self._log.error("the connection to the node's journal is closed: %s", error, exc_info=trace)
            self._connection.shut()
        with self._changed:
            self.lost = True
            waiting, self._waiting = dict(self._waiting), {}
            self._changed.notify_all()
        self._fetched.put(None)
        for step, on_kept in waiting.items():
            on_kept(EntryKept(step, 0, _DIED))

    def _handle(self, answer: EntryTaken | EntryKept | FetchedEntry) -> None:
        match answer:
            case FetchedEntry():
                self._fetched.put(answer)
            case EntryTaken(step):
                with self._changed:
                    self._lent = {number: lent for number, lent in self._lent.items() if lent != step}
                    self._changed.notify_all()
            case EntryKept(step):
                with self._changed:
                    on_kept = self._waiting.pop(step, None)
                if on_kept is not None:
                    on_kept(answer)
