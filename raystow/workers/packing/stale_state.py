"""Detects two consecutive saves of different steps with the same optimizer state: a stale copy of the state was saved.

No other check detects this error: every byte is stored and restored as it was given, but training would continue with wrong
optimizer moments.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

from ...storage.coding import dtypes
from ...storage.coding.digest import stored_digest
from ...storage.format.groups import OPTIMIZER
from ...storage.format.manifest import Chunk
from ...storage.log import about
from ...storage.runtime.metrics import STALE, record

logger = logging.getLogger(__name__)


class OptimizerWatch:
    """Compares this node's parts of the saves in the repository at ``uri``. Thread-safe."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lock = threading.Lock()
        self._last: tuple[int, bytes] | None = None  # step and digest of the last version with optimizer state

    def saved(self, step: int, chunks: Iterable[Chunk]) -> tuple[str, ...]:
        """Compare a save that has become a version with the last one; log and return the warnings for the training process."""
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
    """Return BLAKE3 of the digests of the optimizer's chunks, independent of their order; None if there are none.

    Integers and tensors of one element are excluded: step counters may be correct although the moments are stale.
    """
    rows = sorted((c.name, c.offset, c.extent, c.raw_digest) for c in chunks if _moves(c))
    return stored_digest(*(repr(row).encode() for row in rows)) if rows else None


def _moves(chunk: Chunk) -> bool:
    return chunk.group == OPTIMIZER and dtypes.dtype(chunk.dtype).is_float and math.prod(chunk.shape) > 1
