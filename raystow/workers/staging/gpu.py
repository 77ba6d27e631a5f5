"""Stages chunks in device memory: encodes them on their GPU, in this process or in the node worker's."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...state.planned_chunk import PlannedChunk, PlannedDerived
from ...state.planner import SavePlan
from ...storage.coding.digest import SecretKeys
from ...storage.errors import ClusterError
from ...storage.runtime.clock import SYSTEM
from ..gpu.encode_request import EncodeRequest, EncodingRefused
from ..protocol.messages import BaseDigests, DeviceAnswer, Message, SessionOpened, StageDerived
from .plan import SaveOrder
from .staging_slots import StagingSlots

if TYPE_CHECKING:
    from ..chosen_codec import ChosenCodec
    from ..gpu.gpu_encoder import GpuEncoder
    from ..gpu.node_mode.remote_encoder import RemoteEncoder

logger = logging.getLogger(__name__)

HEAD_START = 4e-3
"""Seconds in which a training that saves tensors on a GPU may launch kernels undisturbed, when ``save`` returns and when
``fence`` does. It has waited, so its queue is nearly empty, and the GPU would be idle while the staging thread has the
interpreter."""


class DeviceStaging:
    """Encodes chunks on GPUs. Torch is loaded when the first such chunk is staged.

    Attributes:
        answers: Receives the node worker's messages about devices.
        encoder: None before the first chunk.
        head_start: See ``HEAD_START``.
        clock: Waits for it.
    """

    def __init__(
        self, slots: StagingSlots, post: Callable[[Message], None], codec: str, process: str, opened: SessionOpened
    ) -> None:
        self._slots, self._post, self._codec, self._process, self._opened = slots, post, codec, process, opened
        self.head_start, self.clock = HEAD_START, SYSTEM
        self.answers: queue.SimpleQueue[DeviceAnswer | None] = queue.SimpleQueue()
        self.bases: dict[int, BaseDigests] = {}
        """By device, the digests of the version that its chunks may refer to."""
        self.encoder: GpuEncoder | RemoteEncoder | None = None

    def choice(self, device: int) -> ChosenCodec:
        """Return the codec of chunks on a device. If the node worker refuses the first device, this process encodes instead."""
        if self.encoder is None:
            self.encoder = self._remote_encoder() if self._process == "node" else self._local_encoder()
        try:
            return self.encoder.choice(device)
        except EncodingRefused as refusal:
            logger.warning(
                'Compression(process="node") is not available for %s. This training process encodes instead, which takes '
                "device memory and computing time. Saves are as safe as before.",
                refusal,
            )
            self.encoder = self._local_encoder()
            return self.encoder.choice(device)

    def prepare(self, device: int, pieces: Sequence[PlannedChunk]) -> None:
        """Allocate, pin and load what encoding needs, and plan it for these chunks."""
        self.choice(device)
        assert self.encoder is not None
        self.encoder.prepare(device, pieces)

    def stage(
        self, order: SaveOrder, plan: SavePlan, device: int, on_read: Callable[[float], None], post: Callable[[Message], None]
    ) -> None:
        """Encode the chunks on a device, and then those that were expected to be derived but cannot be."""
        encoder, after, group = self.encoder, plan.ready[device], plan.parts[device]
        assert encoder is not None
        pieces: Sequence[PlannedChunk] = group.pieces
        followers: Sequence[PlannedDerived] = group.followers
        compares = order.request.delta != 0
        if compares:
            remaining = encoder.compare(device, pieces, followers, self.bases.get(device), after=after)
            pieces, followers = remaining.pieces, remaining.followers
            for message in remaining.messages:  # also if the save has failed: later saves refer to chunks that are described once
                self._post(message)
        check = encoder.follow(device, followers, pieces)

        def meanwhile() -> None:
            check.begin(after=after)
            plan.find_derived()

        def read() -> None:
            if not check.strays:
                on_read(self.head_start)  # longer than to launch an operation, which torch counts then
                if order.progress.urgent.is_set():
                    self.clock.sleep(self.head_start)

        request = EncodeRequest(
            pieces, after, read, urgent=order.progress.urgent.is_set, meanwhile=meanwhile, uploaded=check.uploaded
        )
        encoder.encode(device, request, post)
        if compares:
            encoder.note(device)
        if check.derived:
            post(StageDerived(tuple(check.derived)))
        strays = check.strays
        for follower in strays:
            plan.not_derived(follower)
        if strays:
            stored = [follower.piece for follower in strays]
            encoder.encode(device, EncodeRequest(stored, after, lambda: on_read(0.0), urgent=request.urgent), post)

    def close(self) -> None:
        """Free all memory."""
        if self.encoder is not None:
            self.encoder.close()

    def _remote_encoder(self) -> RemoteEncoder:
        from ..gpu.node_mode.remote_encoder import RemoteEncoder

        return RemoteEncoder(self._codec, send=self._post, receive=self._answer, lend=self._slots.lend)

    def _local_encoder(self) -> GpuEncoder:
        from ..gpu.gpu_encoder import GpuEncoder

        slots = self._slots
        return GpuEncoder(
            slots.ring,
            self._codec,
            take=slots.take_soon,
            release=slots.release,
            free=lambda: slots.free,
            store=self._opened.store_rate,
            keys=SecretKeys(self._opened.secret),
        )

    def _answer(self) -> DeviceAnswer:
        """Return the node worker's next message about a device."""
        answer = self.answers.get()
        if answer is None:
            self.answers.put(None)
            raise ClusterError("the node worker died")
        return answer
