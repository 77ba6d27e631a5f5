"""What a node worker offers its training processes of an earlier version, so that they can store differences to it: the rows of
their own chunks, and the memory in which those lie. It is handed over once, and once more when planes of it have been decoded;
each save only names it. Rows are parsed when someone asks for them, and not when they are heard: that takes the interpreter for a
tenth of a second, which a training that launches kernels shares."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...storage.clock import SYSTEM
from ...storage.coding.chunk import RAW, STREAMED, layout
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, Unsupported
from ...storage.format.boxes import Box
from ...storage.format.manifest import Chunk, Fragment
from .wire import Message

logger = logging.getLogger(__name__)

Pack = tuple[str, int]
"""Group, and number in it."""


@dataclass(frozen=True)
class Offered:
    """A chunk, and its bytes in ``parts``, one behind the other as its coding says. They have not been held against their digest,
    which is that of what is in the pack: not of these bytes, if planes were decoded meanwhile."""

    chunk: Chunk
    parts: tuple[Bytes, ...]


@dataclass(frozen=True)
class Offer:
    """Chunks of the version ``id``: a ``fragment`` that describes them, the ``packs`` that they lie in, and where in decoded
    ``planes`` those of each row begin, -1 for none. The memory is mapped for as long as anything holds it."""

    id: int
    fragment: bytes
    packs: Mapping[Pack, Bytes]
    planes: Bytes | None
    starts: Sequence[int]

    @functools.cached_property
    def chunks(self) -> Mapping[tuple[str, Box], Offered]:
        """By name and box. None, with a warning, if the fragment makes no sense."""
        chunks = dict[tuple[str, Box], Offered]()
        try:
            rows = Fragment.load(self.fragment, 0, f"what is offered of version {self.id}").chunks
            for chunk, start in zip(rows, self.starts, strict=True):
                pack = self.packs.get((chunk.group, chunk.pack))
                stored = None if pack is None else pack[chunk.start : chunk.start + chunk.coding.size]
                if stored is None or stored.size != chunk.coding.size or (start >= 0 and self.planes is None):
                    continue
                whole, planes = Offered(chunk, (stored,)), self.planes
                chunks[chunk.name, chunk.box] = whole if planes is None or start < 0 else _plain(chunk, stored, planes[start:])
        except (Damaged, Unsupported) as error:
            logger.warning("chunks on a GPU are stored whole: %s", error)
            return {}
        return chunks


Named = Callable[[float, Callable[[], bool]], Offer | None]
"""The version that chunks of a save may be stored as differences to. It is waited for so many seconds, or until someone is in a
hurry."""

_LOOK = 1e-3  # seconds until it is asked again whether someone is


class Offers:
    """What a training process has heard. One thread hears, another one asks. ``expected``: whether the newest version is one to
    which the next should be a difference, or is one itself; of a save that nobody expects to differ no name is waited for."""

    def __init__(self) -> None:
        self._gone = deque[int]()  # loans whose memory is not mapped any more
        self._changed = threading.Condition()
        self._packs: dict[Pack, Bytes] = {}  # of the offer that is coming
        self._planes: Bytes | None = None  # of the same, decoded
        self._offer: Offer | None = None
        self._named: dict[int, int] = {}  # save -> version, 0 for none
        self._over = False
        self.expected = False

    def hear(self, message: Message, descriptor: int | None) -> None:
        """One of the messages of ``workers.session``: a pack that is ``lent``, decoded ``planes``, the ``offer`` that they belong
        to, and which version is ``named`` in a save."""
        if "lent" in message:
            group, number = message["lent"]
            if (memory := self._mapped(message, descriptor, f"pack {group}-{number}")) is not None:
                self._packs[group, number] = memory
        elif "planes" in message:
            self._planes = self._mapped(message, descriptor, "their decoded planes")
        elif "offer" in message:
            offer = Offer(message["offer"], message["fragment"], self._packs, self._planes, message["starts"])
            self._packs, self._planes = {}, None
            with self._changed:
                self._offer = offer
        else:
            with self._changed:
                self._named[message["save"]] = message["named"]
                if self._offer is not None and self._offer.id != message["named"]:
                    self._offer = None  # nothing is stored as a difference to it any more: its memory must not be held
                self._changed.notify_all()

    def lost(self) -> None:
        """Nothing more will be heard."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def returned(self) -> list[int]:
        """The loans that are over since this was asked last."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def of(self, save: int, *, surely: bool = True) -> Named:
        """What is named in a save. Unless ``surely``, it is waited for only if something is ``expected`` to be."""
        return functools.partial(self._wait, save, surely)

    def _wait(self, save: int, surely: bool, seconds: float, hurried: Callable[[], bool]) -> Offer | None:
        until = SYSTEM.monotonic() + seconds
        with self._changed:
            awaited = surely or self.expected
            while awaited and not (save in self._named or self._over or SYSTEM.monotonic() > until or hurried()):
                self._changed.wait(_LOOK)
            self._named = {other: id for other, id in self._named.items() if other >= save}
            if save in self._named:
                return self._offer if self._offer is not None and self._offer.id == self._named[save] else None
            if awaited:
                why = "the training waits" if hurried() else f"in {seconds:g} seconds"
                logger.info("chunks on a GPU are stored whole in save %d: no version was named yet (%s)", save, why)
            return None

    def _mapped(self, message: Message, descriptor: int | None, what: str) -> Bytes | None:
        """Memory on loan: until nothing holds it any more, wherever that comes to light."""
        try:
            if descriptor is None:  # as the kernel does it where a process has too many
                raise OSError("its descriptor did not arrive")
            try:
                mapped = mmap.mmap(descriptor, message["nbytes"], prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("chunks of %s are stored whole: it cannot be mapped (%s; see ulimit -n)", what, error)
            self._gone.append(message["loan"])
            return None
        weakref.finalize(mapped, self._gone.append, message["loan"])
        return np.frombuffer(mapped, np.uint8)


def _plain(chunk: Chunk, stored: Bytes, decoded: Bytes) -> Offered:
    """A chunk whose planes of streams were ``decoded``, as one that was stored without coding them; in as few parts as possible,
    since whoever copies them shares an interpreter with the training."""
    coding = chunk.coding
    n, places, end = chunk.decoded // len(coding.codecs), dict[int, tuple[bool, int, int]](), 0  # decoded, from, to
    for place in layout(coding, chunk.words, chunk.decoded, stored.size):
        if place.codec in STREAMED:
            places[place.number] = True, end, end + n
            end += n
        else:
            places[place.number] = False, place.start, place.start + place.size
    codecs = tuple(RAW if codec in STREAMED else codec for codec in coding.codecs)
    plain = replace(coding, codecs=codecs, stored=tuple(places[p][2] - places[p][1] for p in range(len(codecs))), streams=b"")
    spans = list[tuple[bool, int, int]]()
    for place in layout(plain, chunk.words, chunk.decoded, plain.size):
        which, start, stop = places[place.number]
        if spans and spans[-1][0] == which and spans[-1][2] == start:
            start = spans.pop()[1]
        spans.append((which, start, stop))
    if end > decoded.size:
        raise Damaged(f"{decoded.size} bytes of planes where {end} were expected", subject=chunk.name)
    return Offered(replace(chunk, coding=plain), tuple((decoded if which else stored)[i:j] for which, i, j in spans))
