"""What a training process needs where the node worker codes its tensors: it copies them into device memory that both processes
have mapped, and takes their digests. Nothing else of a save happens on its GPU.

The messages, in this order:

    training process    node worker
    OpenDevice          DeviceOpened: the ring that it has made and signed
    CheckDevice         DeviceChecked
    LendSlots           DeviceReady
    StageOnDevice       DeviceSlotFree, for each slot

``DeviceRefused`` may answer each of the first three. If it comes before slots were lent, the training process codes itself.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ....storage.errors import ProtocolError, RaystowError, SaveFailed
from ...protocol.messages import (
    BaseDigests,
    CheckDevice,
    CodedLayout,
    DeviceAnswer,
    DeviceChecked,
    DeviceChunk,
    DeviceOpened,
    DeviceQuestion,
    DeviceReady,
    DeviceRefused,
    DeviceSlotFree,
    LendSlots,
    Message,
    OpenDevice,
    StageCoded,
    StageOnDevice,
)
from ...shm.ring import ALIGN
from ..codec_choice import Choice
from ..digests import digests
from ..encode.derived_check import Following, Lookout, follow
from ..gpu_encoder import GpuEncoder
from ..unchanged import Remaining
from .device_ring import DeviceRing

logger = logging.getLogger(__name__)

Announce = Callable[[StageOnDevice | CodedLayout | StageCoded], None]
_Answer = TypeVar("_Answer", DeviceOpened, DeviceChecked, DeviceReady)

_FIRST = -5  # the highest priority: these few milliseconds are what the training's fence waits for


@dataclass(frozen=True)
class _Mapped:
    """A device's ring, as it is mapped here. ``free``: its slots that may be filled."""

    uuid: str
    ring: DeviceRing
    stream: Any
    free: deque[int]
    choice: Choice


class _Refused(Exception):
    """The node worker cannot code on a device, or cannot be handed anything there."""


class RemoteEncoder:
    """A ``GpuEncoder`` whose work is done by the node worker.

    ``send`` and ``receive``: messages to it, and what it says of devices. ``lend`` leaves the node worker its part of the ring in
    host memory, and says from which slot on. ``local`` makes what codes here instead, where the node worker cannot.
    """

    def __init__(
        self,
        codec: str,
        *,
        send: Callable[[Message], None],
        receive: Callable[[], DeviceAnswer],
        lend: Callable[[], int],
        local: Callable[[], GpuEncoder],
    ) -> None:
        self._codec, self._send, self._receive, self._lend, self._make_local = codec, send, receive, lend, local
        self._mapped: dict[int, _Mapped] = {}
        self._lookouts: dict[int, Lookout] = {}
        self._lent: int | None = None
        self._local: GpuEncoder | None = None

    def choice(self, device: int) -> Choice:
        """What chunks of a device are coded with. The first call for a device maps its ring, and puts it to the test."""
        if self._local is None and device not in self._mapped:
            try:
                self._mapped[device] = self._map(device)
            except _Refused as refusal:
                name = f"GPU {device} ({_uuid(device)})"
                if self._lent is not None:  # the memory to code here is not there any more
                    raise SaveFailed(str(refusal), subject=name, remedy='use Compression(process="training")') from refusal
                logger.warning(
                    'Compression(process="node") is not available for %s: %s. This training process encodes instead, which takes '
                    "device memory and computing time. Saves are as safe as before.",
                    name,
                    refusal,
                )
                self._local = self._make_local()
        return self._mapped[device].choice if self._local is None else self._local.choice(device)

    def compare(self, device: int, part: Any, base: BaseDigests | None, *, after: Any) -> Remaining:
        """See ``GpuEncoder.compare``. What the node worker codes is never compared."""
        if self._local is not None:
            return self._local.compare(device, part, base, after=after)
        return Remaining(part.pieces, part.followers)

    def note(self, device: int) -> None:
        """See ``GpuEncoder.note``."""
        if self._local is not None:
            self._local.note(device)

    def follow(self, device: int, followers: Sequence[Any], *, after: Any) -> Following:
        """See ``GpuEncoder.follow``."""
        return follow(self._lookouts, device, followers, after=after)

    def encode(
        self,
        device: int,
        pieces: Sequence[Any],
        *,
        after: Any,
        on_read: Callable[[], None],
        announce: Announce,
        urgent: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over all chunks; returns when they have been read. See ``GpuEncoder.encode``."""
        if self._local is not None:
            encode = functools.partial(self._local.encode, device, pieces, after=after, on_read=on_read, announce=announce)
            encode(urgent=urgent, meanwhile=meanwhile)
            return
        meanwhile()
        mapped = self._mapped[device]
        with torch.cuda.device(device), torch.cuda.stream(mapped.stream):
            try:
                mapped.stream.wait_event(after)
                sums = digests(pieces, torch.device("cuda", device))
                for batch in _batches(pieces, mapped.ring.slot_size):
                    self._fill(mapped, pieces, batch, sums, announce)
            finally:
                mapped.stream.synchronize()  # also after an error: the tensors may go now
        on_read()

    def close(self) -> None:
        """Unmap the device memory."""
        for mapped in self._mapped.values():
            try:
                mapped.ring.close()
            except RaystowError as error:
                logger.warning("a ring on GPU %s could not be unmapped: %s", mapped.uuid, error)
        self._mapped.clear()
        self._lookouts.clear()
        if self._local is not None:
            self._local.close()

    def _fill(
        self,
        mapped: _Mapped,
        pieces: Sequence[Any],
        batch: list[tuple[int, int]],
        sums: torch.Tensor,
        announce: Announce,
    ) -> None:
        """Copy the chunks of a batch (number, place in the slot) into a slot, and announce them when they are there."""
        slot = self._take(mapped)
        try:
            start = mapped.ring.address + slot * mapped.ring.slot_size
            for i, at in batch:
                source = pieces[i].address
                copy = pieces[i].gather() if source is None else None  # its memory is used again on this stream only
                mapped.ring.write(start + at, source if copy is None else copy.data_ptr(), pieces[i].nbytes)
            mapped.stream.synchronize()
            chunks = [DeviceChunk(pieces[i].describe(), at, pieces[i].nbytes, pieces[i].planes, int(sums[i])) for i, at in batch]
            announce(StageOnDevice(mapped.uuid, slot, tuple(chunks)))
        except BaseException:
            mapped.free.append(slot)
            raise

    def _take(self, mapped: _Mapped) -> int:
        while not mapped.free:
            self._note_free(self._receive())
        return mapped.free.popleft()

    def _note_free(self, message: DeviceAnswer) -> None:
        for mapped in self._mapped.values():
            if isinstance(message, DeviceSlotFree) and mapped.uuid == message.device:
                mapped.free.append(message.slot)

    def _map(self, device: int) -> _Mapped:
        """Open the ring that the node worker makes on a device, see whether it is the same memory, and learn the codec."""
        uuid, stream = _uuid(device), torch.cuda.Stream(device, priority=_FIRST)
        opened = self._ask(OpenDevice(uuid, self._codec), DeviceOpened)
        ring, seen, problem = None, "", ""
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                ring = DeviceRing.open(device, opened.handle, opened.slots, opened.slot_size)
                seen = ring.signature()
            except Exception as error:
                problem = f"its device memory cannot be used here: {error}"
        try:
            self._ask(CheckDevice(uuid, seen), DeviceChecked)
            assert ring is not None
            if self._lent is None:
                self._lent = self._lend()
            ready = self._ask(LendSlots(uuid, self._lent), DeviceReady)
        except BaseException as error:
            if ring is not None:
                ring.close()
            if problem and isinstance(error, _Refused):
                raise _Refused(problem) from error  # the node worker knows only that nothing was seen
            raise
        return _Mapped(uuid, ring, stream, deque(range(ring.slots)), Choice(ready.codec, ready.why))

    def _ask(self, question: DeviceQuestion, expected: type[_Answer]) -> _Answer:
        self._send(question)
        while isinstance(answer := self._receive(), DeviceSlotFree):
            self._note_free(answer)
        if isinstance(answer, DeviceRefused):
            raise _Refused(answer.problem)
        if not isinstance(answer, expected):
            raise ProtocolError(f"{type(answer).__name__} where {expected.__name__} was expected")
        return answer


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _batches(pieces: Sequence[Any], slot_size: int) -> Iterator[list[tuple[int, int]]]:
    """As many chunks (number, place in the slot) as a slot takes."""
    batch, used = list[tuple[int, int]](), 0
    for i, piece in enumerate(pieces):
        if piece.nbytes > slot_size:
            raise SaveFailed(f"a chunk of {piece.nbytes} bytes does not fit into a slot of {slot_size}", subject=piece.name)
        if batch and used + piece.nbytes > slot_size:
            yield batch
            batch, used = [], 0
        batch.append((i, used))
        used += -(-piece.nbytes // ALIGN) * ALIGN
    if batch:
        yield batch
