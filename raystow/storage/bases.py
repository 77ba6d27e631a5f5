"""What the chunks of a version are differences to: chunks of earlier versions, found through the root.

A row names the version only. Where that lies now the root knows, since a version may be written anew, elsewhere, with the same
boxes and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .errors import Damaged
from .format.manifest import Chunk
from .limits import MAX_CHAIN

if TYPE_CHECKING:
    from .reader import Run
    from .version import Version


class Bases:
    """Those of one version. ``look``: for a version of the repository by its id. ``depth``: this one's place in the chain of
    differences that has led to it."""

    def __init__(self, version: Version, look: Callable[[int], Version | None], *, depth: int = 1) -> None:
        self._version, self._look, self._depth = version, look, depth
        self._versions: dict[int, Version] = {}

    def version(self, id: int) -> Version:
        """The base with this id; ``Damaged`` if there is no such version, or if it makes the chain too long."""
        if id not in self._versions:
            base = self._look(id) if id < self._version.id and self._depth < MAX_CHAIN else None
            if base is None:
                what = (
                    f"is a difference to version {id}, which is not there, no older one, or too far down a chain of differences"
                )
                raise Damaged(what, subject=self._version.record_key)
            base.bases = Bases(base, self._look, depth=self._depth + 1)
            self._versions[id] = base
        return self._versions[id]

    def all(self) -> Iterator[Version]:
        """Every version that this one cannot be read without."""
        for id in self._version.record.bases:
            yield (base := self.version(id))
            yield from base.bases.all()

    def run(self, chunk: Chunk) -> Run:
        """What must be fetched for a chunk that is a difference: the one with the same elements in its base, whole."""
        assert chunk.coding.base is not None
        base = self.version(chunk.coding.base)
        found = base.chunk(chunk.source, chunk.box, near=chunk.node)
        if found is None or (found.shape, found.dtype) != (chunk.shape, chunk.words.name):
            box = f"{chunk.source!r}, {chunk.offset} + {chunk.extent}"
            what = f"has no chunk of just {box}, to which version {self._version.id} is a difference"
            raise Damaged(what, subject=base.record_key)
        (run,) = base.reader().whole([found])
        return run
