"""Memory of a node worker that another process may read: a descriptor, and where the object's bytes are in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...storage.errors import ProtocolError
from ..protocol.messages import Span


@dataclass(frozen=True)
class LentMemory:
    """``descriptor``: the reader closes it. ``extents``: where the object's bytes are, one after the other; if empty, at the
    beginning. ``others``: where other objects are in the same memory, by key. ``end``: ends the use of slots of a ring, which a
    process may fill again then."""

    descriptor: int
    extents: tuple[Span, ...] = ()
    others: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    end: Callable[[], None] | None = None

    def spans(self, start: int, length: int) -> Iterator[Span]:
        """Yield where ``length`` bytes from ``start`` of the object are: start and bytes in memory."""
        if not self.extents:
            yield start, length
            return
        for first, end in self.extents:
            count = min(end - first - start, length)
            if count > 0:
                yield first + start, count
                start, length = 0, length - count
            else:
                start -= end - first
            if not length:
                return
        if length:
            raise ProtocolError(f"the object ends {length} bytes before what was requested")

    def close(self) -> None:
        """Close the descriptor, and end the use of slots."""
        os.close(self.descriptor)
        if self.end is not None:
            self.end()
