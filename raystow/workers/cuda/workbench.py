"""What a training process needs to code its tensors on its GPUs: an encoder for each, and the way out that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...storage.chunk import RAW
from ..ring import Ring
from .choice import Choice, choose
from .encoder import Encoder
from .jobs import Coded
from .outbox import Outbox


class Workbench:
    """``encode`` chunks of a device; memory and compiled kernels are kept from one save to the next. ``store``: bytes per second
    that the store has taken so far, 0 if that is not known."""

    def __init__(
        self, ring: Ring, codec: str, *, take: Callable[[], int | None], release: Callable[[int], None], store: float = 0.0
    ) -> None:
        self._codec, self._store = codec, store
        self._outbox = Outbox(ring, take=take, release=release)
        self._encoders: dict[int, Encoder] = {}
        self._choices: dict[int, Choice] = {}

    def choice(self, device: int) -> Choice:
        """What chunks of a device are coded with."""
        if device not in self._choices:
            self._choices[device] = choose(self._codec, torch.device("cuda", device), self._store)
        return self._choices[device]

    def encode(
        self,
        device: int,
        pieces: Sequence[Any],
        *,
        after: Any,
        on_read: Callable[[], None],
        announce: Callable[[list[dict[str, Any]]], None],
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """See ``Encoder.encode``; ``announce`` gets what the node worker must know of chunks whose bytes have arrived."""

        def emit(coded: list[Coded]) -> None:
            announce([_row(chunk) for chunk in coded])
            self._outbox.announced(part for chunk in coded for part in chunk.parts)

        if device not in self._encoders:
            codec = self.choice(device).codec
            self._encoders[device] = Encoder(torch.device("cuda", device), None if codec == RAW else codec, self._outbox)
        try:
            self._encoders[device].encode(pieces, after=after, on_read=on_read, emit=emit, urgent=urgent)
            self._outbox.end()
        except BaseException:
            self._outbox.abandon()
            raise

    def close(self) -> None:
        """Give device memory and pinned memory back."""
        for encoder in self._encoders.values():
            encoder.close()
        self._encoders.clear()
        self._outbox.close()


def _row(chunk: Coded) -> dict[str, Any]:
    """What ``attempt.draft`` takes; the sizes of streams are many, so they go as bytes."""
    coding = chunk.coding
    return {
        **chunk.source.describe(),
        "parts": chunk.parts,
        "coding": [coding.planes, coding.rotated, coding.codecs, coding.stored, coding.stream],
        "streams": chunk.sizes.astype("<i4").tobytes(),
        "digest": chunk.digest,
    }
