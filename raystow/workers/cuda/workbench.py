"""What a training process needs to code its tensors on its GPUs: an encoder for each, and the way out that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...storage.coding.chunk import RAW
from ..ipc.offers import Named
from ..ipc.ring import Ring
from .choice import Choice, choose
from .encoding.differences import samples_of
from .encoding.encoder import Encoder
from .encoding.following import Following, Lookout, follow
from .encoding.memory import SIZE
from .encoding.outbox import Outbox
from .encoding.program import Program
from .encoding.stages import Arrived


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
        self._lookouts: dict[int, Lookout] = {}
        self._said: dict[int, Program] = {}  # whose layout was announced last, by device

    def choice(self, device: int) -> Choice:
        """What chunks of a device are coded with."""
        if device not in self._choices:
            self._choices[device] = choose(self._codec, torch.device("cuda", device), self._store)
        return self._choices[device]

    def follow(self, device: int, followers: Sequence[Any], *, after: Any) -> Following:
        """Begin to look whether chunks follow from those that are being encoded, when the CUDA event ``after`` has come."""
        return follow(self._lookouts, device, followers, after=after, encoder=self._encoders[device])

    def encode(
        self,
        device: int,
        pieces: Sequence[Any],
        *,
        after: Any,
        on_read: Callable[[], None],
        announce: Callable[[dict[str, Any]], None],
        urgent: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
        named: Named | None = None,
        patient: bool = True,
    ) -> None:
        """See ``Encoder.encode``. ``announce`` gets what the node worker must know: the ``layout`` of the chunks of a ``device``,
        where it is new, and what has ``arrived`` of them (see ``ipc.arrival``)."""

        def emit(arrived: list[Arrived]) -> None:
            encoder = self._encoders[device]
            if encoder.program is not self._said.get(device):
                assert encoder.program is not None
                announce({"device": device, "layout": encoder.program.layout(pieces)})
                self._said[device] = encoder.program
            announce({"device": device, "arrived": [one.message for one in arrived]})
            self._outbox.announced(run for one in arrived for run in one.runs)

        if device not in self._encoders:
            codec, where = self.choice(device).codec, torch.device("cuda", device)
            size = SIZE if named is None else SIZE - samples_of(pieces)  # both together are what is promised
            self._encoders[device] = Encoder(where, None if codec == RAW else codec, self._outbox, size=size)
        encode = functools.partial(self._encoders[device].encode, pieces, after=after, on_read=on_read, emit=emit)
        try:
            encode(urgent=urgent, meanwhile=meanwhile, named=named, patient=patient)
            self._outbox.end()
        except BaseException:
            self._outbox.abandon()
            raise

    def close(self) -> None:
        """Give device memory and pinned memory back."""
        for encoder in self._encoders.values():
            encoder.close()
        self._encoders.clear()
        self._lookouts.clear()
        self._outbox.close()
