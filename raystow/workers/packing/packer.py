"""Gathers coded chunks into packs and uploads them, one set of packs for each attempt on a node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass, field

from ...storage.errors import DeadlineExceeded, RaystowError
from ...storage.format import keys
from ...storage.format.version_record import PackInfo
from ...storage.log import about
from ...storage.object_store import Buffer, ObjectStore
from ...storage.runtime.spans import span
from ..protocol.messages import Ticket
from ..shm.slots import Slots, SlotUse

logger = logging.getLogger(__name__)

PACK = 64 << 20
"""Bytes at which a pack is full."""

NOT_IN_TIME = "the store has not taken it in time"


CodedBytes = tuple[str, Sequence[Buffer], Callable[[], None]]
"""The group of a chunk, its coded bytes in parts, and what to call when they are no longer needed."""


Keep = Callable[[str, Sequence[Buffer], Sequence[SlotUse]], memoryview | None]
"""Keeps an object with this key, given in parts, in memory before it is stored; returns the copy, or None if there is none. The
uses: see ``MemoryTier.put``."""


def keep_nothing(key: str, parts: Sequence[Buffer], uses: Sequence[SlotUse]) -> memoryview | None:
    """Keep nothing."""
    return None


@dataclass
class _Open:
    """A pack that still takes chunks."""

    number: int
    parts: list[Buffer] = field(default_factory=list)
    releases: list[Callable[[], None]] = field(default_factory=list)
    size: int = 0


class Packer:
    """Packs and uploads chunks: ``add`` from any thread, then ``seal`` and ``finish`` once, or ``discard``.

    ``on_error`` is called with the error of an upload that failed or could not begin. ``keep`` may copy a pack; the copy is then
    uploaded, and the parts are released at once. A pack has the parts of one ring, so that it can be kept there.
    """

    def __init__(
        self,
        store: ObjectStore,
        ticket: Ticket,
        *,
        uploads: Executor,
        on_error: Callable[[BaseException], None],
        keep: Keep = keep_nothing,
    ) -> None:
        self._store, self._ticket, self._uploads, self._on_error, self._keep = store, ticket, uploads, on_error, keep
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sending = 0
        self._open: dict[tuple[str, Slots | None], _Open] = {}  # by group and, of what is in a ring, the ring
        self._counts: dict[str, int] = {}
        self._packs: list[PackInfo] = []
        self._running: dict[PackInfo, Future[None]] = {}
        self._closed = False
        self._unsent: BaseException | None = None  # why the upload of a pack could not begin

    def add(self, chunks: Sequence[CodedBytes]) -> list[tuple[int, int]]:
        """Append coded chunks; return the number of each one's pack, and its start there."""
        places, full = list[tuple[int, int]](), list[tuple[PackInfo, _Open]]()
        with self._lock:
            for group, parts, release in chunks:
                if self._closed:  # the attempt was given up
                    release()
                    places.append((0, 0))
                    continue
                size = sum(map(len, parts))
                where = group, release.slots if isinstance(release, SlotUse) else None
                pack = self._open.get(where)
                if pack is not None and pack.size and pack.size + size > PACK:
                    full.append(self._close(where))
                    pack = None
                if pack is None:
                    number = self._counts.get(group, 0)
                    self._counts[group] = number + 1
                    pack = self._open[where] = _Open(number)
                places.append((pack.number, pack.size))
                pack.parts.extend(parts)
                pack.releases.append(release)
                pack.size += size
        for one in full:
            self._send(*one)
        return places

    def flush(self) -> None:
        """Begin to upload all open packs."""
        with self._lock:
            closed = [self._close(where) for where in list(self._open)]
        for full in closed:
            self._send(*full)

    def seal(self) -> list[PackInfo]:
        """Close and upload all packs, after the last ``add``; return them once ``keep`` has seen them all. Raises the error of a
        pack whose upload could not begin."""
        self.flush()
        with self._lock:
            self._changed.wait_for(lambda: not self._sending)
            if self._unsent is not None:
                raise self._unsent
            return list(self._packs)

    def finish(self, timeout: float) -> None:
        """Wait until all packs are durable, after ``seal``.

        Raises the store's error if a pack cannot be stored, or ``DeadlineExceeded`` naming a pack that is not durable after
        ``timeout`` seconds.
        """
        done, late = wait(self._running.values(), timeout, FIRST_EXCEPTION)
        for upload in done:
            upload.result()
        for info, upload in self._running.items():
            if upload in late:
                raise DeadlineExceeded(NOT_IN_TIME, subject=self._key(info))

    def unstored(self) -> list[str]:
        """Return the keys of packs whose upload has not ended."""
        with self._lock:
            running = list(self._running.items())
        return [self._key(info) for info, upload in running if not upload.done()]

    def close(self) -> None:
        """Release what comes from now on, and what is in open packs. No pack is offered to ``keep`` after this call."""
        with self._lock:
            self._closed = True
            for pack in self._open.values():
                _call(pack.releases)
            self._open.clear()
            self._changed.wait_for(lambda: not self._sending)

    def discard(self, *, delete: bool) -> None:
        """Cancel all uploads and release all parts. With ``delete``, delete uploaded packs: no version will refer to them."""
        self.close()
        done = [info for info, upload in self._running.items() if not upload.cancel()]
        for info in done:
            self._running[info].exception()
        if not delete:
            return
        try:
            self._store.delete([self._key(info) for info in done])
        except RaystowError as error:
            whose = {"version": self._ticket.id, "attempt": self._ticket.attempt, "step": self._ticket.step}
            log = about(logger, repository=self._store.uri, **whose)
            log.warning("the packs of an abandoned attempt stay until the next collection: %s", error)

    def _close(self, where: tuple[str, Slots | None]) -> tuple[PackInfo, _Open]:
        """Close an open pack; the caller sends it."""
        pack = self._open.pop(where)
        info = PackInfo(self._ticket.node, where[0], pack.number, pack.size)
        self._packs.append(info)
        self._sending += 1
        return info, pack

    def _send(self, info: PackInfo, pack: _Open) -> None:
        """Offer the pack to ``keep``, and begin to upload it. Raises nothing, so that the caller sends its other packs."""
        try:
            uses = [release for release in pack.releases if isinstance(release, SlotUse)]  # all or none
            kept = self._keep(self._key(info), pack.parts, uses)
            if kept is not None:
                pack.parts[:] = [kept]
                _call(pack.releases)
            upload = self._uploads.submit(self._upload, info, pack.parts)
            with self._lock:
                self._running[info] = upload
            upload.add_done_callback(lambda _: _call(pack.releases))
        except BaseException as error:
            _call(pack.releases)
            self._unsent = self._unsent or error
            self._on_error(error)
        finally:
            with self._lock:
                self._sending -= 1
                self._changed.notify_all()

    def _upload(self, info: PackInfo, parts: list[Buffer]) -> None:
        try:
            with span("save.upload", self._ticket.trace, key=self._key(info), bytes=info.size):
                self._store.put(self._key(info), parts)
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            parts.clear()

    def _key(self, info: PackInfo) -> str:
        return keys.pack(self._ticket.id, self._ticket.attempt, info.node, info.group, info.number)


def _call(releases: list[Callable[[], None]]) -> None:
    """Call each once, and drop the references to them."""
    while releases:
        releases.pop()()
