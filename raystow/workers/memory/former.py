"""What this node still has in memory of a version: that which the chunks of a later save may be stored as differences to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ...storage.clock import SYSTEM
from ...storage.coding.delta import LEAST
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, Unsupported
from ...storage.format.boxes import Box
from ...storage.format.keys import pack
from ...storage.format.manifest import Chunk, Fragment
from ...storage.log import about
from ...storage.reader import decode
from ..ipc.offers import Pack
from .memory_tier import Home, Loan, MemoryTier
from .unfolding import starts_of, unfold_all, unfolds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lending:
    """Chunks of a version for a process to map. ``fragment``: their rows, sorted by name and offset; ``packs``: the memory they
    lie in, as far as it is here. ``planes``: that of their decoded planes, if they were decoded; ``starts``: where in it those of
    each row begin, -1 for a row without any."""

    fragment: bytes
    packs: dict[Pack, Loan]
    planes: Loan | None
    starts: list[int]


class Former:
    """The chunks of the version ``home`` that this node has made itself. From any thread. It holds no memory of the tier: what
    goes from there is not found here any more."""

    def __init__(self, tier: MemoryTier, home: Home) -> None:
        self._tier, self.home = tier, home
        self._starts: dict[tuple[str, Box], int] = {}  # of chunks whose planes are decoded, where those begin
        self._damaged = set[tuple[str, Box]]()

    def elements(self, chunk: Chunk, into: Bytes) -> Bytes | None:
        """The bytes of the chunk with the same elements, in ``into`` or other memory that the caller may write to; None if it is
        not here, or no good as a base: too small, or a difference itself."""
        found = self._chunks.get((chunk.name, chunk.box)) if chunk.nbytes >= LEAST else None
        if found is None or found.coding.base is not None or (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
            return None
        data = self._stored(found)
        if data is None:
            return None
        try:
            return decode(found, data, into=into[: found.nbytes])[1]
        except (Damaged, Unsupported) as error:
            log = about(logger, version=self.home.id, attempt=self.home.attempt)
            log.warning("%r is stored whole, since that of version %d does not serve: %s", chunk.name, self.home.id, error)
            return None

    def unfold(self, wanted: Collection[tuple[str, Box]], *, threads: int) -> None:
        """Decode those planes of these chunks that are made of streams, on so many threads, and keep them in the tier beside the
        version. If there is no room the log says so, and each GPU decodes them on its own, in every save."""
        log = about(logger, version=self.home.id, attempt=self.home.attempt)
        chunks = [chunk for chunk in self._serving(wanted) if unfolds(chunk) and self._stored(chunk) is not None]
        if not chunks:
            return
        starts, began = starts_of(chunks), SYSTEM.monotonic()

        def write(target: memoryview) -> None:
            for chunk, error in unfold_all(chunks, self._stored, target, threads=threads):
                self._damaged.add((chunk.name, chunk.box))
                log.warning("%r is stored whole, since that of version %d does not serve: %s", chunk.name, self.home.id, error)

        if self._tier.put_planes(self.home, starts[-1], write):
            self._starts = {(chunk.name, chunk.box): start for chunk, start in zip(chunks, starts, strict=False)}
            took = SYSTEM.monotonic() - began
            log.info("%.1f MB of planes of version %d are decoded, in %.2f seconds", starts[-1] / 1e6, self.home.id, took)
        elif self.home in self._tier:
            what = "GPUs decode planes of version %d in every save that differs from it: %.1f MB more do not fit into %.1f MB"
            log.warning(what, self.home.id, starts[-1] / 1e6, self._tier.budget / 1e6)

    @property
    def unfolded(self) -> bool:
        """Whether planes are decoded, and still here."""
        return bool(self._starts) and self._tier.planes(self.home) > 0

    def lend(self, wanted: Collection[tuple[str, Box]]) -> Lending:
        """Of these chunks the rows, without those that are no good as a base, and the memory that they lie in."""
        rows = self._serving(wanted)
        fragment = Fragment(0, tuple(rows), ()).dump()
        keys = {(chunk.group, chunk.pack): self._pack(chunk) for chunk in rows}
        loans = ((of, self._tier.loan(self.home.repository, key)) for of, key in keys.items())
        packs = {of: loan for of, loan in loans if loan is not None}
        planes = self._tier.loan_planes(self.home) if self._starts else None
        starts = [-1 if planes is None else self._starts.get((chunk.name, chunk.box), -1) for chunk in rows]
        return Lending(fragment, packs, planes, starts)

    def _serving(self, wanted: Collection[tuple[str, Box]]) -> list[Chunk]:
        """Of these chunks those that are here, sorted by name and offset."""
        found = (self._chunks[key] for key in wanted if key in self._chunks and key not in self._damaged)
        serving = (chunk for chunk in found if chunk.coding.base is None and chunk.derivation is None)
        return sorted(serving, key=lambda chunk: (chunk.name, chunk.offset))

    def _pack(self, chunk: Chunk) -> str:
        return pack(self.home.id, self.home.attempt, chunk.node, chunk.group, chunk.pack)

    def _stored(self, chunk: Chunk) -> Bytes | None:
        """The stored bytes of a chunk, if they are here."""
        stored = self._tier.view(self.home.repository, self._pack(chunk))
        return None if stored is None else np.frombuffer(stored, np.uint8)[chunk.start : chunk.start + chunk.coding.size]

    @functools.cached_property
    def _chunks(self) -> dict[tuple[str, Box], Chunk]:
        for holding in self._tier.holdings(self.home.repository):
            if holding.home == self.home:
                made = {n: holding.fragment(n) for n, part in holding.parts.items() if not part.line}
                views = {n: self._tier.view(self.home.repository, key) for n, key in made.items()}
                fragments = [Fragment.load(bytes(view), n, made[n]) for n, view in views.items() if view is not None]
                return {(chunk.name, chunk.box): chunk for fragment in fragments for chunk in fragment.chunks}
        return {}
