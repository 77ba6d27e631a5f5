"""An object of the store in the slots of a staging ring, where a GPU has written it: it is kept in memory without a copy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from ..shm.ring import SlotPart
from ..shm.slots import Slots, SlotUse
from .lent_memory import LentMemory
from .pack_file import PackFile


class RingPack:
    """``size`` bytes in ``parts`` of slots, which stay in use until ``close``."""

    def __init__(self, slots: Slots, parts: Sequence[SlotPart], size: int) -> None:
        self.slots, self.size = slots, size
        self._parts, self._spans = parts, slots.ring.spans(parts)

    @staticmethod
    def of(uses: Sequence[SlotUse]) -> RingPack | None:
        """Keep chunks that are in use in one ring; return None if the ring may not keep more slots."""
        parts = [part for use in uses for part in use.parts]
        if not parts or not uses[0].slots.keep(parts):
            return None
        return RingPack(uses[0].slots, parts, sum(size for _, _, size in parts))

    def lend(self, others: Mapping[str, RingPack] | None = None) -> LentMemory:
        """Return the memory, and that of other objects in the same ring, by key. Its slots are in use until it is closed."""
        ring, more = self.slots.ring, others or {}
        _, use = self.slots.take_over([*self._parts, *itertools.chain.from_iterable(pack._parts for pack in more.values())])
        return LentMemory(os.dup(ring.fd), self._spans, {key: pack._spans for key, pack in more.items()}, use)

    def hold(self) -> tuple[list[memoryview], SlotUse]:
        """Return the bytes in parts, and what to call when they are no longer read."""
        parts, use = self.slots.take_over(self._parts)
        return [part.data for part in parts], use

    def close(self) -> None:
        """Free the slots."""
        self.slots.drop_kept(self._parts)


def copied(held: tuple[list[memoryview], SlotUse], size: int) -> PackFile:
    """Copy what ``hold`` has returned, and end the use of the slots."""
    parts, done = held
    try:
        file = PackFile(size)
        file.write(parts)
        return file
    finally:
        parts.clear()
        done()
