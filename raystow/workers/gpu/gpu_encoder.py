"""What a training process needs to code its tensors on its GPUs: an encoder for each, and the way out that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...storage.coding.chunk import RAW
from ..protocol.messages import BaseDigests, CodedLayout, StageCoded
from ..shm.ring import Ring
from .codec_choice import Choice, choose
from .encode.derived_check import Following, Lookout, follow
from .encode.encode_plan import Program
from .encode.encoder import Encoder
from .encode.pinned_ring import Outbox
from .encode.stages import Arrived
from .unchanged import Remaining, UnchangedChunks

_NONE = np.empty(0, np.uint64)


class GpuEncoder:
    """``encode`` chunks of a device; memory and compiled kernels are kept from one save to the next. ``store``: bytes per second
    that the store has taken so far, 0 if that is not known."""

    def __init__(
        self, ring: Ring, codec: str, *, take: Callable[[], int | None], release: Callable[[int], None], store: float = 0.0
    ) -> None:
        self._codec, self._store = codec, store
        self._outbox = Outbox(ring, take=take, release=release)
        self._encoders: dict[int, Encoder] = {}
        self._choices: dict[int, Choice] = {}
        self._lookouts: dict[int, Lookout] = {}
        self._unchanged: dict[int, UnchangedChunks] = {}
        self._encoding = False
        self._sums = _NONE
        self._said: dict[int, Program] = {}  # whose layout was announced last, by device

    def choice(self, device: int) -> Choice:
        """What chunks of a device are coded with."""
        if device not in self._choices:
            self._choices[device] = choose(self._codec, torch.device("cuda", device), self._store)
        return self._choices[device]

    def compare(self, device: int, part: Any, base: BaseDigests | None, *, after: Any) -> Remaining:
        """What of a part must be stored, since it has changed since ``base``: see ``UnchangedChunks``."""
        if device not in self._unchanged:
            self._unchanged[device] = UnchangedChunks(torch.device("cuda", device))
        return self._unchanged[device].compare(part.pieces, part.followers, base, after=after)

    def note(self, device: int) -> None:
        """All that ``compare`` left of a device was encoded."""
        self._unchanged[device].note(self._sums)

    def follow(self, device: int, followers: Sequence[Any], *, after: Any) -> Following:
        """Begin to look whether chunks follow from those that are being encoded, when the CUDA event ``after`` has come."""
        encoder = self._encoders[device] if self._encoding else None
        return follow(self._lookouts, device, followers, after=after, encoder=encoder)

    def encode(
        self,
        device: int,
        pieces: Sequence[Any],
        *,
        after: Any,
        on_read: Callable[[], None],
        announce: Callable[[CodedLayout | StageCoded], None],
        urgent: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """See ``Encoder.encode``. ``announce`` gets the messages for the node worker: the layout of the chunks if it is new, and
        where the chunks are that have arrived."""

        self._sums = _NONE
        if not pieces:
            meanwhile()
            on_read()
            return

        def emit(arrived: list[Arrived]) -> None:
            encoder = self._encoders[device]
            if encoder.program is not self._said.get(device):
                assert encoder.program is not None
                announce(encoder.program.layout(device, pieces))
                self._said[device] = encoder.program
            announce(StageCoded(device, tuple([one.message for one in arrived])))
            self._outbox.announced(run for one in arrived for run in one.runs)

        if device not in self._encoders:
            codec, where = self.choice(device).codec, torch.device("cuda", device)
            self._encoders[device] = Encoder(where, None if codec == RAW else codec, self._outbox)
        encode = functools.partial(self._encoders[device].encode, pieces, after=after, on_read=on_read, emit=emit)
        self._encoding = True
        try:
            encode(urgent=urgent, meanwhile=meanwhile)
            self._sums = self._encoders[device].sums
            self._outbox.end()
        except BaseException:
            self._outbox.abandon()
            raise
        finally:
            self._encoding = False

    def close(self) -> None:
        """Give device memory and pinned memory back."""
        for encoder in self._encoders.values():
            encoder.close()
        self._encoders.clear()
        self._lookouts.clear()
        self._outbox.close()
