"""What other nodes ask this one to keep for them."""

from __future__ import annotations

from dataclasses import dataclass

from ...storage.object_store import Buffer
from ..memory.memory_tier import Holding, Home, MemoryTier, Part


@dataclass(frozen=True)
class Copy:
    """An object for another node. ``number``: of the node in the attempt that made it. ``line``: see ``Part``. ``after``: what
    must be there before it. ``base``: what the attempt may be a difference to."""

    home: Home
    number: int
    key: str
    line: tuple[str, ...]
    after: tuple[str, ...] = ()
    base: Home | None = None


class Guests:
    """The copies in this node's memory tier. From any thread."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier

    def accept(self, copy: Copy, data: Buffer) -> Part:
        """Keep an object if there is room; what is here of its part now."""
        newer = [other for other in self._tier.holdings(copy.home.repository) if other.home.id > copy.home.id]
        leaning = any(other.base == copy.home for other in newer)
        if not leaning and any(other.committed or other.given_up for other in newer):
            return Part()  # replaced already: it would stay until the version after that
        held = self._part(copy) or Part(line=copy.line)
        if held.line and not held.short and copy.key not in held.objects and held.objects.keys() >= {*copy.after}:
            self._tier.put(copy.home, copy.number, copy.key, [data], line=copy.line)
            if copy.base is not None:
                self._tier.lean(copy.home, copy.base)
        return self._part(copy) or Part()

    def committed(self, home: Home) -> None:
        """An attempt is a version."""
        if self._held(home) is not None:
            self._tier.committed(home)

    def given_up(self, home: Home) -> None:
        """Another node says that an attempt will never be a version. A node that has a part in it hears that for itself."""
        held = self._held(home)
        if held is not None and not held.committed and all(part.line for part in held.parts.values()):
            self._tier.given_up(home)

    def _held(self, home: Home) -> Holding | None:
        return next((held for held in self._tier.holdings(home.repository) if held.home == home), None)

    def _part(self, copy: Copy) -> Part | None:
        held = self._held(copy.home)
        return held.parts.get(copy.number) if held is not None else None
