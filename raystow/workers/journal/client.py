"""A training process's connection to the journal of its node."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ...storage.errors import ClusterError, ProtocolError
from ...storage.log import about
from ...storage.runtime import background
from ..protocol.messages import (
    RECORDING,
    EntryInfo,
    EntryKept,
    EntryPlace,
    FetchedEntry,
    FetchEntry,
    Generation,
    KeepEntry,
    OpenJournal,
    SaveBegun,
    SaveWithdrawn,
    ShareMemory,
    SlotsFree,
)
from ..protocol.unix_channel import Connection
from ..shm.anonymous_memory import AnonymousMemory
from ..shm.free_slots import DIED
from ..shm.ring import Ring
from .entry_writer import EntryWriter

logger = logging.getLogger(__name__)

_GROWTH = 1 << 30  # bytes by which memory for fetched entries grows; pages are allocated at their first use


class JournalClient:
    """One thread records entries, and one fetches them. ``ClusterError`` if the node worker is gone.

    Args:
        ring: Recorded entries pass through it.
        patience: Seconds within which an entry must have been fetched.
        slot_patience: Seconds within which the node worker must have emptied a slot of the ring.

    Attributes:
        connection: To the node worker.
        lost: Whether it is gone.
    """

    def __init__(
        self, address: str, opening: OpenJournal, ring: Ring, *, patience: float = 120.0, slot_patience: float = 10.0
    ) -> None:
        self._patience = patience
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self.connection = Connection.connect(address)
        self.connection.send(opening)
        self._share(RECORDING, ring.fd, ring.memory.size)
        self._writer = EntryWriter(ring, self.connection.send, patience=slot_patience)
        self._lock = threading.Lock()
        self._waiting: dict[int, Callable[[EntryKept], None]] = {}
        self._fetched: queue.SimpleQueue[FetchedEntry | None] = queue.SimpleQueue()
        self._memories: dict[int, tuple[AnonymousMemory, memoryview]] = {}  # of fetched entries
        self.lost = False
        self._thread = background.start("raystow-journal-answers", self._listen)

    def begin(self, info: EntryInfo, most: int) -> EntryWriter:
        """Begin an entry of at most ``most`` bytes; return what writes it. Fetched entries are gone.

        ``info``: without the size.
        """
        if self.lost:
            raise ClusterError(DIED)
        while self._memories:
            self._memories.popitem()[1][0].close()
        self._writer.begin(info, most)
        return self._writer

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        """Let the node keep the entry that was written. ``on_kept`` is called from another thread."""
        written = self._writer.end()
        with self._lock:
            if self.lost or written != info.size:  # another node worker got the bytes
                raise ClusterError(DIED)
            self._waiting[info.step] = on_kept
        try:
            self.connection.send(KeepEntry(info))
        except ClusterError:
            with self._lock:
                self._waiting.pop(info.step, None)
            raise

    def save_begun(self, step: int, generation: Generation) -> None:
        """Tell that a save of the state after a step is under way. ``generation``: of the entries that are recorded now."""
        self.connection.send(SaveBegun(step, generation))

    def save_failed(self, step: int) -> None:
        """Tell that a save that had begun has failed."""
        self.connection.send(SaveWithdrawn(step))

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        """Return the bytes of an entry, which the node keeps from then on. They are valid until the next call with ``number``, or
        of ``begin``."""
        memory = RECORDING + 1 + number
        content = self._memory(memory, place.info.size).toreadonly()
        self.connection.send(FetchEntry(place, memory))
        try:
            answer = self._fetched.get(timeout=self._patience)
        except queue.Empty:
            self.lost = True  # the answer may still come, and is to no other question
            self.connection.shut()
            raise ClusterError(f"no entry after {self._patience:.0f} s", subject=f"entry of step {place.info.step}") from None
        if answer is None:
            self._fetched.put(None)
            raise ClusterError(DIED)
        if answer.problem:
            raise ClusterError(f"is not in memory any more: {answer.problem}", subject=f"entry of step {place.info.step}")
        return content

    def close(self) -> None:
        """Close the connection; the node keeps the entries."""
        self.connection.close()
        self._thread.join()
        for memory, _ in self._memories.values():
            memory.close()

    def _memory(self, number: int, nbytes: int) -> memoryview:
        """Shared memory with a number, at least so large."""
        memory, mapped = self._memories.get(number) or (AnonymousMemory.empty(0), memoryview(b""))
        if nbytes > memory.size or number not in self._memories:
            memory.grow(-(-max(nbytes, 1) // _GROWTH) * _GROWTH)
            mapped = memory.target
            self._memories[number] = memory, mapped
            self._share(number, memory.descriptor, memory.size)
        return mapped[:nbytes]

    def _share(self, number: int, descriptor: int, size: int) -> None:
        self.connection.send(ShareMemory(number, size), fd=descriptor)

    def _listen(self) -> None:
        try:
            received: tuple[SlotsFree | EntryKept | FetchedEntry, int | None] | None
            while (received := self.connection.receive(SlotsFree, EntryKept, FetchedEntry)) is not None:
                self._handle(received[0])
        except Exception as error:
            trace = not isinstance(error, ProtocolError)
            self._log.error("the connection to the node's journal is closed: %s", error, exc_info=trace)
            self.connection.shut()
        with self._lock:
            self.lost = True
            waiting, self._waiting = dict(self._waiting), {}
        self._writer.close()
        self._fetched.put(None)
        for step, on_kept in waiting.items():
            on_kept(EntryKept(step, 0, DIED))

    def _handle(self, answer: SlotsFree | EntryKept | FetchedEntry) -> None:
        match answer:
            case SlotsFree(slots):
                self._writer.freed(slots)
            case FetchedEntry():
                self._fetched.put(answer)
            case EntryKept(step):
                with self._lock:
                    on_kept = self._waiting.pop(step, None)
                if on_kept is not None:
                    on_kept(answer)
