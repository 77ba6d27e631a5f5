"""Gathers coded chunks into packs and uploads them, one set of packs for each attempt on a node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from ..storage import keys
from ..storage.errors import RaystowError
from ..storage.object_store import Buffer, ObjectStore
from ..storage.version_record import PackInfo
from .port import Ticket

logger = logging.getLogger(__name__)

PACK = 64 << 20
"""Bytes at which a pack is full."""


@dataclass
class _Open:
    """A pack that still takes chunks."""

    number: int
    parts: list[Buffer] = field(default_factory=list)
    releases: list[Callable[[], None]] = field(default_factory=list)
    size: int = 0


class Packer:
    """``add`` from any thread; then ``finish`` once, or ``discard``. ``on_error`` is told the first failed upload."""

    def __init__(
        self, store: ObjectStore, ticket: Ticket, *, uploads: Executor, on_error: Callable[[BaseException], None]
    ) -> None:
        self._store, self._ticket, self._uploads, self._on_error = store, ticket, uploads, on_error
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._counts: dict[str, int] = {}
        self._packs: list[PackInfo] = []
        self._running: list[Future[None]] = []
        self._closed = False

    def add(self, group: str, parts: Sequence[Buffer], release: Callable[[], None]) -> tuple[int, int]:
        """Append a coded chunk, given in parts; its pack's number and its start in bytes. ``release`` is called when the parts
        are needed no longer."""
        size = sum(map(len, parts))
        with self._lock:
            if self._closed:  # given up: nothing is kept
                release()
                return 0, 0
            pack = self._open.get(group)
            if pack is None or (pack.size and pack.size + size > PACK):
                self._flush(group)
                number = self._counts.get(group, 0)
                self._counts[group] = number + 1
                pack = self._open[group] = _Open(number)
            start = pack.size
            pack.parts.extend(parts)
            pack.releases.append(release)
            pack.size += size
            return pack.number, start

    def flush(self) -> None:
        """Upload what lies in open packs: the budget is short, or the attempt is complete."""
        with self._lock:
            for group in list(self._open):
                self._flush(group)

    def finish(self) -> list[PackInfo]:
        """Upload the rest and wait for all uploads; the packs, durable."""
        self.flush()
        for upload in self._running:
            upload.result()
        return list(self._packs)

    def discard(self, *, delete: bool) -> None:
        """Stop, and give back the memory; with ``delete``, delete what was uploaded: the attempt will never be a version."""
        with self._lock:
            self._closed = True
            for pack in self._open.values():
                _call(pack.releases)
            self._open.clear()
        for upload in self._running:
            upload.cancel()
        done = [info for info, upload in zip(self._packs, self._running, strict=True) if not upload.cancelled()]
        for upload in self._running:
            if not upload.cancelled():
                upload.exception()
        if not delete:
            return
        try:
            self._store.delete([self._key(info) for info in done])
        except RaystowError as error:
            logger.warning("the packs of an abandoned attempt stay until the next collection: %s", error)

    def _flush(self, group: str) -> None:
        pack = self._open.pop(group, None)
        if pack is None:
            return
        info = PackInfo(self._ticket.node, group, pack.number, pack.size)
        self._packs.append(info)
        upload = self._uploads.submit(self._upload, info, pack.parts)
        upload.add_done_callback(lambda _: _call(pack.releases))
        self._running.append(upload)

    def _upload(self, info: PackInfo, parts: list[Buffer]) -> None:
        try:
            self._store.put(self._key(info), parts)
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            parts.clear()

    def _key(self, info: PackInfo) -> str:
        return keys.pack(self._ticket.id, self._ticket.attempt, info.node, info.group, info.number)


def _call(releases: list[Callable[[], None]]) -> None:
    """Call each once, and let go of what they hold on to."""
    while releases:
        releases.pop()()
