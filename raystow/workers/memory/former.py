"""What this node still has in memory of a version: that which the chunks of a later save may be stored as differences to."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection

import numpy as np

from ...storage.coding.delta import LEAST
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, Unsupported
from ...storage.format.boxes import Box
from ...storage.format.keys import pack
from ...storage.format.manifest import Chunk, Fragment
from ...storage.log import about
from ...storage.reader import decode
from ..ipc.offers import Pack
from .memory_tier import Home, MemoryTier

logger = logging.getLogger(__name__)


class Former:
    """The chunks of the version ``home`` that this node has made itself. From any thread. It holds no memory of the tier: what
    goes from there is not found here any more."""

    def __init__(self, tier: MemoryTier, home: Home) -> None:
        self._tier, self.home = tier, home

    def elements(self, chunk: Chunk, into: Bytes) -> Bytes | None:
        """The bytes of the chunk with the same elements, in ``into`` or other memory that the caller may write to; None if it is
        not here, or no good as a base: too small, or a difference itself."""
        found = self._chunks.get((chunk.name, chunk.box)) if chunk.nbytes >= LEAST else None
        if found is None or found.coding.base is not None or (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
            return None
        key = pack(self.home.id, self.home.attempt, found.node, found.group, found.pack)
        stored = self._tier.view(self.home.repository, key)
        if stored is None:
            return None
        try:
            data = np.frombuffer(stored, np.uint8)[found.start : found.start + found.coding.size]
            return decode(found, data, into=into[: found.nbytes])[1]
        except (Damaged, Unsupported) as error:
            log = about(logger, version=self.home.id, attempt=self.home.attempt)
            log.warning("%r is stored whole, since that of version %d does not serve: %s", chunk.name, self.home.id, error)
            return None

    def lend(self, wanted: Collection[tuple[str, Box]]) -> tuple[bytes, dict[Pack, tuple[int, int]]]:
        """Of these chunks the rows, as a fragment, and of the packs that they lie in the memory: a descriptor, for the caller to
        close, and bytes. What is not here, or no good as a base, is left out."""
        found = [self._chunks[key] for key in wanted if key in self._chunks]
        packs, rows = dict[Pack, tuple[int, int]](), list[Chunk]()
        for chunk in (chunk for chunk in found if chunk.coding.base is None and chunk.derivation is None):
            of = chunk.group, chunk.pack
            key = pack(self.home.id, self.home.attempt, chunk.node, *of)
            if of not in packs and (memory := self._tier.borrow(self.home.repository, key)) is not None:
                packs[of] = memory, os.fstat(memory).st_size
            if of in packs:
                rows.append(chunk)
        return Fragment(0, tuple(rows), ()).dump(), packs

    @functools.cached_property
    def _chunks(self) -> dict[tuple[str, Box], Chunk]:
        for holding in self._tier.holdings(self.home.repository):
            if holding.home == self.home:
                made = {n: holding.fragment(n) for n, part in holding.parts.items() if not part.line}
                views = {n: self._tier.view(self.home.repository, key) for n, key in made.items()}
                fragments = [Fragment.load(bytes(view), n, made[n]) for n, view in views.items() if view is not None]
                return {(chunk.name, chunk.box): chunk for fragment in fragments for chunk in fragment.chunks}
        return {}
