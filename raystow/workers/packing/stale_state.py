"""Tells when two saves in a row hold the same optimizer state, though at different steps: something hands over a stale copy.

Nothing else finds this fault. Every byte is stored as it was given and comes back as it was stored; only that whoever restores it
trains on from the wrong moments.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

from ...storage.coding import dtypes
from ...storage.coding.digest import stored_digest
from ...storage.format.manifest import Chunk
from ...storage.log import about
from ...storage.metrics import STALE, record

logger = logging.getLogger(__name__)

GROUP = "optimizer"
"""The group of chunks that change with every step of the optimizer."""


class OptimizerWatch:
    """Compares the saves of the repository at ``uri``, as far as this node stores them. Any thread may call."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lock = threading.Lock()
        self._last: tuple[int, bytes] | None = None  # step and digest of the last version that held optimizer state

    def saved(self, step: int, chunks: Iterable[Chunk]) -> tuple[str, ...]:
        """A save has become a version: what the training process should be warned of. Logged here, too."""
        digest = state_digest(chunks)
        if digest is None:
            return ()
        with self._lock:
            last, self._last = self._last, (step, digest)
        if last is None or last[0] == step or last[1] != digest:
            return ()
        text = (
            f"two saves hold the same optimizer state, bit for bit: those of steps {last[0]} and {step}. "
            "Either the optimizer has not stepped in between, or a stale copy of its state was saved"
        )
        about(logger, repository=self._uri, step=step).warning("%s: %s", self._uri, text)
        record(STALE, repository=self._uri)
        return (text,)


def state_digest(chunks: Iterable[Chunk]) -> bytes | None:
    """BLAKE3 over what the optimizer's chunks hold, in any order of chunks; None if there are none.

    Integers and tensors of one element are left out: they are step counters, which may be right where the moments are stale.
    """
    rows = sorted((c.name, c.offset, c.extent, c.raw_digest) for c in chunks if _moves(c))
    return stored_digest(*(repr(row).encode() for row in rows)) if rows else None


def _moves(chunk: Chunk) -> bool:
    return chunk.group == GROUP and dtypes.dtype(chunk.dtype).is_float and math.prod(chunk.shape) > 1
