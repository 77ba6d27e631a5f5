"""The training process's part of encoding in the node worker: it copies chunks into device memory that both processes have
mapped, and takes their digests. No other work of a save is done on the GPU by the training process.

The messages, in this order:

    training process    node worker
    OpenDevice          DeviceOpened: the ring that it has allocated and signed
    CheckDevice         Acknowledged
    LendSlots           DeviceReady
    StageOnDevice       SlotsFree

Each of the first three may be answered by ``DeviceRefused``.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.cuda import Event

from ....state.planned_chunk import PlannedChunk, PlannedDerived
from ....storage.errors import ProtocolError, RaystowError, SaveFailed
from ....storage.runtime.batches import batches
from ...chosen_codec import ChosenCodec
from ...protocol.messages import (
    Acknowledged,
    BaseDigests,
    CheckDevice,
    DeviceAnswer,
    DeviceChunk,
    DeviceOpened,
    DeviceQuestion,
    DeviceReady,
    DeviceRefused,
    LendSlots,
    Message,
    OpenDevice,
    SlotsFree,
    StageOnDevice,
)
from ...shm.ring import ALIGN
from ..digests import Digests
from ..encode.derived_check import DerivedCheck, DerivedChecker, check_derived
from ..encode_request import EncodeRequest, EncodingRefused, Source
from ..kernels.library import copy_on_device
from ..unchanged import Remaining
from .device_ring import DeviceRing

logger = logging.getLogger(__name__)

Announce = Callable[[StageOnDevice], None]
_Batch = list[tuple[int, int]]  # for each chunk of a slot its number and its start in the slot
_Answer = TypeVar("_Answer", DeviceOpened, Acknowledged, DeviceReady)

_PRIORITY = -5  # of the stream, the highest: the training's fence waits for these copies


@dataclass(frozen=True)
class _MappedDevice:
    """A device's ring as it is mapped in this process. ``free``: the slots that may be filled."""

    uuid: str
    ring: DeviceRing
    stream: torch.cuda.Stream
    free: deque[int]
    choice: ChosenCodec


class RemoteEncoder:
    """Has the methods of ``GpuEncoder``; the node worker does the work.

    Args:
        codec: The codec to use, or ``auto``.
        send: Sends a message to the node worker.
        receive: Returns its next message about a device.
        lend: Leaves part of the ring in host memory to the node worker, and returns the first slot of that part.
    """

    def __init__(
        self, codec: str, *, send: Callable[[Message], None], receive: Callable[[], DeviceAnswer], lend: Callable[[], int]
    ) -> None:
        self._codec, self._send, self._receive, self._lend = codec, send, receive, lend
        self._mapped: dict[int, _MappedDevice] = {}
        self._checkers: dict[int, DerivedChecker] = {}
        self._lent: int | None = None

    def choice(self, device: int) -> ChosenCodec:
        """Return the codec of chunks on a device. The first call for a device maps its ring and checks it.

        Raises ``EncodingRefused`` if the node worker cannot encode on the device, or ``SaveFailed`` if host memory was already
        lent to it for another device.
        """
        if device not in self._mapped:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            try:
                self._mapped[device] = self._map(device, uuid)
            except EncodingRefused as refusal:
                name = f"GPU {device} ({uuid})"
                if self._lent is None:
                    raise EncodingRefused(f"{name}: {refusal}") from refusal
                raise SaveFailed(str(refusal), subject=name, remedy='use Compression(process="training")') from refusal
        return self._mapped[device].choice

    def prepare(self, device: int, pieces: Sequence[Source]) -> None:
        """Do nothing: the node worker prepares when ``choice`` opens the device."""

    def compare(
        self,
        device: int,
        pieces: Sequence[PlannedChunk],
        followers: Sequence[PlannedDerived],
        base: BaseDigests | None,
        *,
        after: Event,
    ) -> Remaining:
        """Return all chunks: none are compared in this mode."""
        return Remaining(pieces, followers)

    def note(self, device: int) -> None:
        """Do nothing, since no chunks were compared."""

    def follow(self, device: int, followers: Sequence[PlannedDerived], pieces: Sequence[PlannedChunk]) -> DerivedCheck:
        """See ``GpuEncoder.follow``."""
        return check_derived(self._checkers, device, followers)

    def encode(self, device: int, request: EncodeRequest, announce: Announce) -> None:
        """Copy all chunks to the node worker's ring; return when they have been read. See ``GpuEncoder.encode``."""
        mapped, pieces = self._mapped[device], request.pieces
        try:
            request.meanwhile()
            with torch.cuda.device(device), torch.cuda.stream(mapped.stream):
                mapped.stream.wait_event(request.after)
                sums = Digests(pieces, torch.device("cuda", device)).take()
                for batch in _batches(pieces, mapped.ring.slot_size):
                    self._fill(mapped, pieces, batch, sums, announce)
        except BaseException:
            torch.cuda.synchronize(device)  # then the tensors, and the memory of the checker, may be freed
            raise
        request.on_read()

    def close(self) -> None:
        """Unmap the device memory."""
        for mapped in self._mapped.values():
            try:
                mapped.ring.close()
            except RaystowError as error:
                logger.warning("a ring on GPU %s could not be unmapped: %s", mapped.uuid, error)
        self._mapped.clear()
        self._checkers.clear()

    def _fill(
        self, mapped: _MappedDevice, pieces: Sequence[Source], batch: _Batch, sums: torch.Tensor, announce: Announce
    ) -> None:
        """Copy the chunks of a batch into a free slot, and announce them once they are there."""
        while not mapped.free:
            self._note_free(self._receive())
        slot = mapped.free.popleft()
        try:
            start = mapped.ring.address + slot * mapped.ring.slot_size
            for i, at in batch:
                source = pieces[i].address
                if source is None:
                    copy = pieces[i].gather()  # its memory is reused on this stream only
                    source = int(copy.data_ptr())
                copy_on_device(start + at, source, pieces[i].nbytes)
            mapped.stream.synchronize()
            chunks = [DeviceChunk(pieces[i].describe(), at, pieces[i].nbytes, pieces[i].planes, int(sums[i])) for i, at in batch]
            announce(StageOnDevice(mapped.uuid, slot, tuple(chunks)))
        except BaseException:
            mapped.free.append(slot)
            raise

    def _note_free(self, message: DeviceAnswer) -> None:
        for mapped in self._mapped.values():
            if isinstance(message, SlotsFree) and mapped.uuid == message.device:
                mapped.free.extend(message.slots)

    def _map(self, device: int, uuid: str) -> _MappedDevice:
        """Map the ring that the node worker allocates on a device, check that both see the same memory, and ask for the codec."""
        stream = torch.cuda.Stream(device, priority=_PRIORITY)
        opened = self._ask(OpenDevice(uuid, self._codec), DeviceOpened)
        ring, seen, problem = None, "", ""
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                ring = DeviceRing.open(device, opened.handle, opened.slots, opened.slot_size)
                seen = ring.signature()
            except Exception as error:
                problem = f"its device memory cannot be used here: {error}"
        try:
            self._ask(CheckDevice(uuid, seen), Acknowledged)
            assert ring is not None
            if self._lent is None:
                self._lent = self._lend()
            ready = self._ask(LendSlots(uuid, self._lent), DeviceReady)
        except BaseException as error:
            if ring is not None:
                ring.close()
            if problem and isinstance(error, EncodingRefused):
                raise EncodingRefused(problem) from error  # the node worker knows only that the signature is wrong
            raise
        return _MappedDevice(uuid, ring, stream, deque(range(ring.slots)), ChosenCodec(ready.codec, ready.why))

    def _ask(self, question: DeviceQuestion, expected: type[_Answer]) -> _Answer:
        self._send(question)
        while isinstance(answer := self._receive(), SlotsFree):
            self._note_free(answer)
        if isinstance(answer, DeviceRefused):
            raise EncodingRefused(answer.problem)
        if not isinstance(answer, expected):
            raise ProtocolError(f"{type(answer).__name__} where {expected.__name__} was expected")
        return answer


def _batches(pieces: Sequence[Source], slot_size: int) -> Iterator[_Batch]:
    """Distribute the chunks over slots."""
    sizes = [-(-piece.nbytes // ALIGN) * ALIGN for piece in pieces]
    for numbers in batches(range(len(pieces)), sizes.__getitem__, slot_size):
        if sizes[numbers[0]] > slot_size:
            piece = pieces[numbers[0]]
            raise SaveFailed(f"a chunk of {piece.nbytes} bytes does not fit into a slot of {slot_size}", subject=piece.name)
        starts = itertools.accumulate((sizes[i] for i in numbers), initial=0)
        yield list(zip(numbers, starts, strict=False))
