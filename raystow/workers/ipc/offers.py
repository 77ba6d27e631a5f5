"""What a node worker offers its training processes of an earlier version, so that they can store differences to it: the rows of
their own chunks, and the memory in which those lie. It is handed over once; afterwards each save only names it."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...storage.clock import SYSTEM
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, Unsupported
from ...storage.format.boxes import Box
from ...storage.format.manifest import Chunk, Fragment
from .wire import Message

logger = logging.getLogger(__name__)

Pack = tuple[str, int]
"""Group, and number in it."""


@dataclass(frozen=True)
class Offer:
    """Chunks of the version ``id``. The memory is mapped for as long as anything holds it."""

    id: int
    chunks: Mapping[tuple[str, Box], Chunk]
    packs: Mapping[Pack, Bytes]

    def stored(self, chunk: Chunk) -> Bytes | None:
        """The stored bytes of one of the chunks, not yet held against their digest; None if they were not offered."""
        pack = self.packs.get((chunk.group, chunk.pack))
        stored = None if pack is None else pack[chunk.start : chunk.start + chunk.coding.size]
        return stored if stored is not None and stored.size == chunk.coding.size else None


Named = Callable[[float], Offer | None]
"""The version that chunks of a save may be stored as differences to, which is waited for so many seconds."""


class Offers:
    """What a training process has heard. One thread hears, another one asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packs: dict[Pack, Bytes] = {}  # of the offer that is coming
        self._offer: Offer | None = None
        self._named: dict[int, int] = {}  # save -> version, 0 for none
        self._over = False

    def hear(self, message: Message, descriptor: int | None) -> None:
        """One of the messages of ``workers.session``: a pack that is ``lent``, the ``offer`` that it belongs to, and which
        version is ``named`` in a save."""
        if "lent" in message:
            self._map(*message["lent"], descriptor=descriptor)
        elif "offer" in message:
            packs, self._packs = self._packs, {}
            self._take(message["offer"], message["fragment"], packs)
        else:
            with self._changed:
                self._named[message["save"]] = message["named"]
                self._changed.notify_all()

    def lost(self) -> None:
        """Nothing more will be heard."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def of(self, save: int) -> Named:
        """What is named in a save."""
        return lambda seconds: self._wait(save, seconds)

    def _map(self, group: str, number: int, size: int, *, descriptor: int | None) -> None:
        try:
            if descriptor is None:  # as the kernel does it where a process has too many
                raise OSError("its descriptor did not arrive")
            try:
                self._packs[group, number] = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("chunks of pack %s-%d are stored whole: it cannot be mapped (%s; see ulimit -n)", group, number, error)

    def _take(self, id: int, fragment: bytes, packs: dict[Pack, Bytes]) -> None:
        try:
            chunks = Fragment.load(fragment, 0, f"what is offered of version {id}").chunks
        except (Damaged, Unsupported) as error:
            logger.warning("chunks on a GPU are stored whole: %s", error)
            return
        with self._changed:
            self._offer = Offer(id, {(chunk.name, chunk.box): chunk for chunk in chunks}, packs)

    def _wait(self, save: int, seconds: float) -> Offer | None:
        until = SYSTEM.monotonic() + seconds
        with self._changed:
            while save not in self._named and not self._over and (left := until - SYSTEM.monotonic()) > 0:
                self._changed.wait(left)
            self._named = {other: id for other, id in self._named.items() if other >= save}
            if save not in self._named:
                logger.info("chunks on a GPU are stored whole in save %d: no version was named in %g seconds", save, seconds)
                return None
            if self._offer is not None and self._offer.id != self._named[save]:
                self._offer = None  # nothing is stored as a difference to it any more: its memory must not be held
            return self._offer
