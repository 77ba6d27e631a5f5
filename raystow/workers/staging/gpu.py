"""Stages chunks in device memory: codes them on their GPU, in this process or in the node worker's."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ...storage.clock import SYSTEM
from ...storage.errors import ClusterError
from ..protocol.messages import BaseDigests, DerivedChunk, DeviceAnswer, Message, StageDerived
from .free_slots import FreeSlots
from .plan import ChunkSource, DerivedSource, SaveOrder, StagingPlan

if TYPE_CHECKING:
    from ..gpu.gpu_encoder import GpuEncoder

HEAD_START = 4e-3
"""Seconds in which a training that saves tensors on a GPU may launch kernels undisturbed, when ``save`` returns and when
``fence`` does. It has waited, so its queue is nearly empty, and the GPU would be idle while the staging thread has the
interpreter."""


class CodecChoice(Protocol):
    """A codec, and why it was chosen."""

    @property
    def codec(self) -> str:
        """Its name."""

    @property
    def why(self) -> str:
        """For people."""


class DerivedCheck(Protocol):
    """Which chunks follow from others. The first access waits for the device."""

    @property
    def strays(self) -> Sequence[DerivedSource]:
        """Those that do not."""

    @property
    def derived(self) -> Sequence[DerivedChunk]:
        """Those that do."""


class StagedGroup(Protocol):
    """Chunks of a device."""

    @property
    def pieces(self) -> Sequence[ChunkSource]:
        """Those that are stored in any case."""

    @property
    def followers(self) -> Sequence[DerivedSource]:
        """Those that are stored only if they do not follow from others."""


class RemainingGroup(StagedGroup, Protocol):
    """Chunks of a device that must be stored."""

    @property
    def messages(self) -> Sequence[Message]:
        """What the node worker must know of the others."""


class DeviceCoder(Protocol):
    """``gpu.gpu_encoder.GpuEncoder`` or ``gpu.node_mode.remote_encoder.RemoteEncoder``."""

    def choice(self, device: int) -> CodecChoice:
        """Return the codec of chunks on a device."""

    def compare(self, device: int, group: StagedGroup, base: BaseDigests | None, *, after: object) -> RemainingGroup:
        """Return the chunks of a group that have changed since ``base``."""

    def note(self, device: int) -> None:
        """All chunks that ``compare`` returned were coded."""

    def follow(self, device: int, followers: Sequence[DerivedSource], *, after: object) -> DerivedCheck:
        """Begin to check which chunks follow from those that are being coded."""

    def encode(
        self,
        device: int,
        pieces: Sequence[ChunkSource],
        *,
        after: object,
        on_read: Callable[[], None],
        announce: Callable[[Message], None],
        urgent: Callable[[], bool],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Code chunks, and announce where the results are."""

    def close(self) -> None:
        """Free all memory."""


class DeviceStaging:
    """Makes the coder when the first chunk on a GPU comes: it loads torch and Triton. ``answers``: the node worker's."""

    def __init__(self, slots: FreeSlots, post: Callable[[Message], None], codec: str, process: str, store_rate: float) -> None:
        self._slots, self._post, self._codec, self._process, self._store_rate = slots, post, codec, process, store_rate
        self.answers: queue.SimpleQueue[DeviceAnswer | None] = queue.SimpleQueue()
        self.bases: dict[int, BaseDigests] = {}
        """By device, the digests of the version that its chunks may refer to."""
        self._made: DeviceCoder | None = None

    @property
    def coder(self) -> DeviceCoder:
        """The coder of all devices."""
        if self._made is None and self._process == "node":
            from ..gpu.node_mode.remote_encoder import RemoteEncoder

            lend = self._slots.lend
            self._made = RemoteEncoder(self._codec, send=self._post, receive=self._answer, lend=lend, local=self._local)
        elif self._made is None:
            self._made = self._local()
        return self._made

    def give_head_start(self, order: SaveOrder) -> None:
        """Let the training launch kernels first, unless it waits for the staging."""
        order.urgent.wait(HEAD_START)

    def stage(
        self, order: SaveOrder, plan: StagingPlan, device: int, on_read: Callable[[], None], post: Callable[[Message], None]
    ) -> None:
        """Code the chunks on a device, and then those that were expected to follow from them but do not."""
        coder, after = self.coder, plan.ready[device]
        group: StagedGroup = plan.parts[device]
        compares = order.begin.delta != 0
        if compares:
            remaining = coder.compare(device, plan.parts[device], self.bases.get(device), after=after)
            for message in remaining.messages:
                post(message)
            group = remaining
        checks = list[DerivedCheck]()

        def check() -> None:
            checks.append(coder.follow(device, group.followers, after=after))
            plan.look_again()

        def read() -> None:
            if not checks[0].strays:
                on_read()
                if order.urgent.is_set():
                    SYSTEM.sleep(HEAD_START)

        encode = functools.partial(coder.encode, device, after=after, announce=post, urgent=order.urgent.is_set)
        encode(group.pieces, on_read=read, meanwhile=check)
        if compares:
            coder.note(device)
        if checks[0].derived:
            post(StageDerived(tuple(checks[0].derived)))
        strays = checks[0].strays
        for follower in strays:
            plan.strayed(follower)
        if strays:
            encode([follower.piece for follower in strays], on_read=on_read)

    def close(self) -> None:
        """Free all memory."""
        if self._made is not None:
            self._made.close()

    def _local(self) -> GpuEncoder:
        from ..gpu.gpu_encoder import GpuEncoder

        slots = self._slots
        return GpuEncoder(slots.ring, self._codec, take=slots.take_soon, release=slots.release, store=self._store_rate)

    def _answer(self) -> DeviceAnswer:
        """Return the node worker's next message about a device."""
        answer = self.answers.get()
        if answer is None:
            self.answers.put(None)
            raise ClusterError("the node worker died")
        return answer
