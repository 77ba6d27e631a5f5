"""Keeps the packs and the fragment of a node's part of an attempt in memory, before they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...storage.object_store import Buffer
from ..protocol.messages import AttemptKey
from ..shm.slots import SlotUse
from .tier import MemoryTier


class Keep(Protocol):
    """Keeps copies of objects in memory."""

    def __call__(self, key: str, parts: Sequence[Buffer], uses: Sequence[SlotUse] = ()) -> memoryview | None:
        """Keep an object, given in parts; return the copy, or None if there is none. ``uses``: see ``MemoryTier.put``."""


def keep_nothing(key: str, parts: Sequence[Buffer], uses: Sequence[SlotUse] = ()) -> memoryview | None:
    """Keep nothing."""
    return None


def keeper(tier: MemoryTier, attempt: AttemptKey, node: int, kept: Callable[[], None]) -> Keep:
    """Return what keeps the objects of node number ``node`` for ``attempt``; ``kept`` is called after each object."""

    def keep(key: str, parts: Sequence[Buffer], uses: Sequence[SlotUse] = ()) -> memoryview | None:
        copy = tier.put(attempt, node, key, parts, uses=uses)
        kept()
        return copy

    return keep
