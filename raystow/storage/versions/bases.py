"""The versions that a version is a delta to, or refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import structs

from ..coding.derived import Derivation
from ..errors import Damaged
from ..format.manifest import Chunk
from ..limits import MAX_CHAIN
from .reader import PackReader
from .runs import ByteRun

if TYPE_CHECKING:
    from .version import Version


class Bases:
    """The versions that one version is a delta to. A row names a version only; the root says which attempt that is now.

    Args:
        version: The version.
        look: Finds a version of the repository by its id.
        found: The versions that were found, by id, which all chains share.
    """

    def __init__(self, version: Version, look: Callable[[int], Version | None], found: dict[int, Version] | None = None) -> None:
        self._version, self._look = version, look
        self._depth = 1  # the version's place in the longest chain of deltas that was read
        self._versions = {} if found is None else found
        self._readers: dict[int, PackReader] = {}

    def version(self, id: int) -> Version:
        """The base with this id. Raises ``Damaged`` if there is none, or if it makes the chain too long."""
        base = None
        if id < self._version.id and self._depth < MAX_CHAIN:
            base = self._versions.get(id) or self._look(id)
        if base is None:
            what = f"needs version {id}, which is not there, no older one, or too far down a chain of deltas"
            raise Damaged(what, subject=self._version.record_key)
        if id not in self._versions:
            base.bases = Bases(base, self._look, self._versions)
        base = self._versions.setdefault(id, base)
        base.bases._depth = max(base.bases._depth, self._depth + 1)
        return base

    def all(self) -> Iterator[Version]:
        """Every version that this one cannot be read without, each once."""
        found: dict[int, Version] = {}
        self._collect(found)
        yield from found.values()

    def run(self, chunk: Chunk) -> ByteRun:
        """What is fetched for a delta: the chunk with the same elements in its base, whole."""
        base, found = self._same(chunk)
        (run,) = base.reader().whole([found])
        return run

    def referenced(self, chunk: Chunk) -> tuple[PackReader, Chunk]:
        """The row of a reference, with place and coding of the bytes that it refers to, and the reader of their version."""
        base, found = self._same(chunk)
        if found.is_reference:
            what = f"{chunk.source!r} is a reference itself, to which version {self._version.id} refers"
            raise Damaged(what, subject=base.record_key)
        if base.id not in self._readers:
            self._readers[base.id] = base.reader()
        derivation = found.derivation if chunk.derivation is None else Derivation(found.source, found.words.name)
        row = structs.replace(found, name=chunk.name, dtype=chunk.dtype, raw_digest=chunk.raw_digest, derivation=derivation)
        return self._readers[base.id], row

    def _collect(self, found: dict[int, Version]) -> None:
        for id in self._version.record.bases:
            if id not in found:
                found[id] = self.version(id)
                found[id].bases._collect(found)

    def _same(self, chunk: Chunk) -> tuple[Version, Chunk]:
        """The base of a chunk, and the row there with the same elements."""
        assert chunk.coding.base is not None
        base = self.version(chunk.coding.base)
        found = base.chunk(chunk.source, chunk.box, near=chunk.node)
        if found is None or (found.shape, found.dtype) != (chunk.shape, chunk.words.name):
            box = f"{chunk.source!r}, {chunk.offset} + {chunk.extent}"
            what = f"has no chunk of just {box}, to which version {self._version.id} is a delta"
            raise Damaged(what, subject=base.record_key)
        return base, found
