"""Encodes a training process's tensors on its GPUs, with an encoder for each GPU and one pinned ring for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.cuda import Event

from ...state.planned_chunk import PlannedChunk, PlannedDerived
from ...storage.coding.chunk import RAW
from ...storage.coding.digest import SecretKeys, process_keys
from ..chosen_codec import ChosenCodec
from ..protocol.messages import BaseDigests, CodedLayout, StageCoded
from ..shm.ring import Ring
from .codec_choice import choose
from .encode.derived_check import DerivedCheck, DerivedChecker, check_derived
from .encode.encode_plan import EncodePlan
from .encode.encoder import Encoder
from .encode.pinned_ring import PinnedRing
from .encode.stages import Arrived
from .encode_request import EncodeRequest, Source
from .kernels.library import load_all
from .pinned_memory import BUFFERS
from .unchanged import Remaining, UnchangedChunks
from .uploads import Uploads

_NO_DIGESTS: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


class GpuEncoder:
    """Encodes chunks of any device. Memory and compiled kernels are kept from one save to the next.

    Args:
        ring: The staging ring.
        codec: The codec to use, or ``auto``.
        take, release, free: See ``PinnedRing``.
        store: Bytes per second that the store has accepted so far; 0 if unknown.
        keys: Of the digests by which the node worker finds unchanged chunks.
    """

    def __init__(
        self,
        ring: Ring,
        codec: str,
        *,
        take: Callable[[], int | None],
        release: Callable[[Sequence[int]], None],
        free: Callable[[], int] = lambda: 0,
        store: float = 0.0,
        keys: SecretKeys | None = None,
    ) -> None:
        self._codec, self._store, self._keys = codec, store, keys or process_keys()
        self._ring = PinnedRing(ring, take=take, release=release, free=free)
        self._encoders: dict[int, Encoder] = {}
        self._uploads: dict[int, Uploads] = {}
        self._choices: dict[int, ChosenCodec] = {}
        self._checkers: dict[int, DerivedChecker] = {}
        self._unchanged: dict[int, UnchangedChunks] = {}
        self._announced: dict[int, EncodePlan] = {}  # the plan whose layout was announced last, by device
        self._digests = _NO_DIGESTS

    def choice(self, device: int) -> ChosenCodec:
        """Return the codec of chunks on a device."""
        if device not in self._choices:
            self._choices[device] = choose(self._codec, torch.device("cuda", device), self._store)
        return self._choices[device]

    def prepare(self, device: int, pieces: Sequence[Source]) -> None:
        """Make the encoder of a device, load its kernels, and plan the encoding of these chunks."""
        load_all(torch.device("cuda", device))
        if pieces:
            self._encoder(device).prepare(pieces)

    def compare(
        self,
        device: int,
        pieces: Sequence[PlannedChunk],
        followers: Sequence[PlannedDerived],
        base: BaseDigests | None,
        *,
        after: Event,
    ) -> Remaining:
        """Return the chunks that have changed since ``base``: see ``UnchangedChunks.compare``."""
        if device not in self._unchanged:
            self._unchanged[device] = UnchangedChunks(torch.device("cuda", device), self._keys, self._uploads_to(device))
        return self._unchanged[device].compare(pieces, followers, base, after=after)

    def note(self, device: int) -> None:
        """Note that all chunks that ``compare`` returned for a device were encoded by the last ``encode``."""
        self._unchanged[device].note(self._digests)

    def follow(self, device: int, followers: Sequence[PlannedDerived], pieces: Sequence[PlannedChunk]) -> DerivedCheck:
        """Return a check of which chunks can be derived from others. ``pieces``: those that are encoded meanwhile."""
        return check_derived(self._checkers, device, followers, pieces, self._uploads_to(device))

    def encode(self, device: int, request: EncodeRequest, announce: Callable[[CodedLayout | StageCoded], None]) -> None:
        """Encode the chunks of a device.

        ``announce`` receives the messages for the node worker: the layout of the chunks if it is new, and the places of chunks
        that have arrived in the ring. Raises ``SaveFailed`` naming a tensor that was changed too early.
        """

        def emit(arrived: list[Arrived]) -> None:
            plan = encoder.plan
            assert plan is not None
            if plan is not self._announced.get(device):
                announce(plan.layout(device, request.pieces))
                self._announced[device] = plan
            announce(StageCoded(device, tuple([one.message for one in arrived])))
            self._ring.announced(run for one in arrived for run in one.runs)

        self._digests = _NO_DIGESTS
        try:
            if not request.pieces:
                request.meanwhile()
                request.on_read()
                return
            encoder = self._encoder(device)
            encoder.encode(request, emit)
            self._digests = encoder.digests
            self._ring.end()
        except BaseException:
            torch.cuda.synchronize(device)  # then the memory of a check that ``meanwhile`` began may be freed
            self._ring.abandon()
            raise

    def _encoder(self, device: int) -> Encoder:
        if device not in self._encoders:
            codec = self.choice(device).codec
            of, uploads = torch.device("cuda", device), self._uploads_to(device)
            self._encoders[device] = Encoder(of, None if codec == RAW else codec, self._ring, uploads=uploads)
        return self._encoders[device]

    def _uploads_to(self, device: int) -> Uploads:
        if device not in self._uploads:
            self._uploads[device] = Uploads(torch.device("cuda", device))
        return self._uploads[device]

    def close(self) -> None:
        """Free device memory and pinned memory."""
        for encoder in self._encoders.values():
            encoder.close()
        for uploads in self._uploads.values():
            uploads.close()
        self._encoders.clear()
        self._checkers.clear()
        self._ring.close()
        BUFFERS.free()
