"""A committed version that a later save is compared with: unchanged chunks refer to it, others may be deltas to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from ...storage.coding.chunk import reference
from ...storage.coding.delta import LEAST
from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, Unsupported
from ...storage.format.boxes import Box
from ...storage.format.keys import pack
from ...storage.format.manifest import Chunk
from ...storage.log import about
from ...storage.versions.runs import decode
from ..protocol.messages import AttemptKey
from .tier import MemoryTier

logger = logging.getLogger(__name__)

Identity = tuple[str, Box]
"""A tensor's name, and a chunk's box."""

_NO_BYTES = stored_digest()


@dataclass(frozen=True)
class KnownChunks:
    """The rows of a version that this node has written.

    ``second``: the second number of ``digest_pair`` where it is known. ``attempts``: by id, the version and those that it refers
    to.
    """

    attempt: AttemptKey
    rows: Mapping[Identity, Chunk] = field(default_factory=dict)
    second: Mapping[Identity, int] = field(default_factory=dict)
    attempts: Mapping[int, AttemptKey] = field(default_factory=dict)

    def reference(self, chunk: Chunk, second: int) -> Chunk | None:
        """Return the row of ``chunk`` as a reference, or None if it is small or has changed.

        The result names the version that stores the bytes, and never one that refers to them itself.
        """
        identity = chunk.name, chunk.box
        row = self.rows.get(identity)
        if row is None or chunk.nbytes < LEAST or self.second.get(identity) != second:
            return None
        if (row.raw_digest, row.dtype, row.shape, row.kind) != (chunk.raw_digest, chunk.dtype, chunk.shape, chunk.kind):
            return None
        coding, derivation = (row.coding, row.derivation) if row.is_reference else (reference(self.attempt.id), None)
        return replace(chunk, pack=0, start=0, coding=coding, derivation=derivation, stored_digest=_NO_BYTES)

    def second_of(self, chunk: Chunk) -> int:
        """Return the second number of the same chunk; 0 if there is none that could be referred to."""
        identity = chunk.name, chunk.box
        row, second = self.rows.get(identity), self.second.get(identity)
        if row is None or second is None or (row.dtype, row.shape, row.kind) != (chunk.dtype, chunk.shape, chunk.kind):
            return 0
        return second

    def nearest(self, bases: tuple[int, ...]) -> AttemptKey | None:
        """Return the newest of these versions whose place is known."""
        return next((self.attempts[id] for id in reversed(bases) if id in self.attempts), None)


class BaseVersion:
    """What a save is compared with. Methods may be called from any thread.

    It keeps no memory of the tier: a pack that the tier drops is not found here any more.

    Args:
        tier: Holds the packs that deltas need.
        chunks: The version's rows.
        deltas: Whether changed chunks may be stored as deltas.
    """

    def __init__(self, tier: MemoryTier, chunks: KnownChunks, *, deltas: bool) -> None:
        self._tier, self.chunks, self._deltas = tier, chunks, deltas

    @property
    def id(self) -> int:
        """The version's id."""
        return self.chunks.attempt.id

    def elements(self, chunk: Chunk, into: Bytes) -> Bytes | None:
        """Decode the base of a delta.

        Returns:
            The bytes of the chunk with the same elements, in ``into`` or other memory that the caller may write to. None if no
            delta is requested, the bytes are not in memory, or the chunk is small, a delta or a reference itself.
        """
        found = self.chunks.rows.get((chunk.name, chunk.box)) if self._deltas and chunk.nbytes >= LEAST else None
        if found is None or found.coding.base is not None or (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
            return None
        attempt = self.chunks.attempt
        view = self._tier.view(attempt.repository, pack(attempt.id, attempt.token, found.node, found.group, found.pack))
        if view is None:
            return None
        data = np.frombuffer(view, np.uint8)[found.start : found.start + found.coding.size]
        try:
            return decode(found, data, into=into[: found.nbytes])[1]
        except (Damaged, Unsupported) as error:
            log = about(logger, version=attempt.id, attempt=attempt.token)
            log.warning("%r is stored whole: its chunk of version %d cannot be decoded: %s", chunk.name, attempt.id, error)
            return None
