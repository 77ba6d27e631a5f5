"""The node worker's part of encoding for a training process: it encodes chunks in shared device memory, on one thread for each
training process.

The node worker owns all memory: the rings on the devices, and the slots of pinned host memory for the results. Chunks that were
announced before a training process died are encoded all the same. For the messages see ``remote_encoder``.
"""

from __future__ import annotations

import functools
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ....storage.coding import dtypes
from ....storage.coding.chunk import RAW
from ....storage.coding.digest import finish
from ....storage.errors import ClusterError, RaystowError, SaveFailed
from ....storage.log import about
from ....storage.runtime import background
from ...packing.attempt import NodeAttempt, taken_over
from ...protocol.messages import (
    Acknowledged,
    CheckDevice,
    ChunkInfo,
    CodedLayout,
    DeviceAnswer,
    DeviceOpened,
    DeviceQuestion,
    DeviceReady,
    DeviceRefused,
    LendSlots,
    Message,
    OpenDevice,
    SlotsFree,
    StageCoded,
    StageOnDevice,
)
from ...shm.coded_layout import Layout
from ...shm.ring import Ring
from ...shm.slots import Slots
from ..encode_request import DeviceSource, EncodeRequest, changed_too_early
from ..gpu_encoder import GpuEncoder
from ..nvcomp import version
from .device_ring import DeviceRing

logger = logging.getLogger(__name__)

_THREAD = "raystow-encode"


@dataclass(frozen=True)
class _SlotChunk(DeviceSource):
    """A ``Source`` in a slot of device memory."""

    info: ChunkInfo
    address: int
    nbytes: int
    planes: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.dtype(self.info.dtype)

    @property
    def origin(self) -> int:
        return self.address

    @property
    def identity(self) -> tuple[ChunkInfo, tuple[int, ...]]:
        return self.info, self.planes

    def describe(self) -> ChunkInfo:
        return self.info


@dataclass(frozen=True)
class _FilledSlot:
    """A slot that the training process has filled. ``number``: this node's in the attempt."""

    attempt: NodeAttempt | None
    number: int
    staged: StageOnDevice


class NodeEncoder:
    """Encodes for one training process.

    Args:
        ring: The ring in host memory; the training process lends a part of it.
        rank: The rank of the training process.
        send: Sends a message to it.
    """

    def __init__(self, ring: Ring, rank: int, send: Callable[[Message], None]) -> None:
        self._ring, self._rank, self._send = ring, rank, send
        self._log = about(logger, rank=rank)
        self._thread = ThreadPoolExecutor(1, _THREAD)
        self._device_rings: dict[str, DeviceRing] = {}  # by the UUID of the device
        self._codec = RAW
        self._lent: Ring | None = None
        self._slots: Slots | None = None  # of the lent part
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # lent slots
        self._encoder: GpuEncoder | None = None
        self._filled: deque[_FilledSlot] = deque()
        self._layouts: dict[int, Layout] = {}  # of the chunks that were encoded last, by device
        self._digests: dict[ChunkInfo, int] = {}  # by the training process, of the chunks that are being encoded
        self._attempt: NodeAttempt | None = None  # that is being encoded
        self._failed: NodeAttempt | None = None

    def ask(self, question: DeviceQuestion) -> None:
        """Answer the training process's question about a device."""
        background.submit(self._thread, _THREAD, self._answer, question)

    def code(self, work: StageOnDevice, attempt: NodeAttempt | None, number: int) -> None:
        """Encode the chunks in a slot of device memory; ``number`` is this node's in the attempt."""
        self._filled.append(_FilledSlot(attempt, number, work))
        background.submit(self._thread, _THREAD, self._encode_filled)

    def end(self, attempt: NodeAttempt) -> None:
        """Report the rank as finished once everything that was given to ``code`` before is encoded."""
        background.submit(self._thread, _THREAD, attempt.finished, self._rank)

    def close(self) -> None:
        """Finish what is left, and free all memory."""
        background.submit(self._thread, _THREAD, self._free_device_memory)
        self._thread.shutdown()
        if self._slots is not None and self._lent is not None:
            self._slots.wait()  # until all results have been uploaded
            self._lent.close()

    def _answer(self, question: DeviceQuestion) -> None:
        answer: DeviceAnswer
        try:
            match question:
                case OpenDevice(uuid, codec):
                    answer = self._open(uuid, codec)
                case CheckDevice(uuid, seen):
                    answer = self._compare(uuid, seen)
                case LendSlots(uuid, first):
                    answer = self._take_over(uuid, first)
        except Exception as error:
            if not isinstance(error, RaystowError):
                self._log.exception("GPU %s cannot be used for rank %d", question.device, self._rank)
            answer = DeviceRefused(question.device, str(error) or repr(error))
        self._tell(answer)

    def _open(self, uuid: str, codec: str) -> DeviceOpened:
        """Allocate a ring on the training process's device, and sign it. One that it did not come to use is freed."""
        if (unused := self._device_rings.pop(uuid, None)) is not None:
            unused.close()
        index = _index(uuid)
        torch.cuda.set_device(index)
        if codec != RAW:
            version()  # raises if nvCOMP is missing
        ring = DeviceRing.create(index)
        try:
            ring.sign()
            self._device_rings[uuid] = ring
            self._codec = codec
            return DeviceOpened(uuid, ring.handle(), ring.slots, ring.slot_size)
        except BaseException:
            self._device_rings.pop(uuid, None)
            ring.close()
            raise

    def _compare(self, uuid: str, seen: str) -> Acknowledged:
        if seen != self._device_rings[uuid].signed:
            self._device_rings.pop(uuid).close()
            raise ClusterError("what the node worker wrote into device memory is not what the training process reads there")
        return Acknowledged()

    def _take_over(self, uuid: str, first: int) -> DeviceReady:
        """Take over slots of host memory, for the first device, and choose the codec."""
        if self._lent is None:
            self._lent = self._ring.behind(first)
            self._slots = Slots(self._lent, self._put_free)
            self._put_free(range(self._lent.slots))
        if self._encoder is None:
            assert self._slots is not None
            self._encoder = GpuEncoder(self._lent, self._codec, take=self._take, release=self._slots.filled)
        choice = self._encoder.choice(self._device_rings[uuid].index)
        return DeviceReady(uuid, choice.codec, f"{choice.why}; coded by the node worker")

    def _encode_filled(self) -> None:
        """Encode all slots that are filled by now, of one save and one device: larger batches are encoded faster."""
        if not self._filled:
            return  # they were encoded with earlier slots
        attempt, uuid, slots = self._filled[0].attempt, self._filled[0].staged.device, list[_FilledSlot]()
        while self._filled and self._filled[0].attempt is attempt and self._filled[0].staged.device == uuid:
            slots.append(self._filled.popleft())
        unread = [filled.staged.slot for filled in slots]

        def on_read() -> None:
            if unread:
                self._tell(SlotsFree(tuple(unread), uuid))
                unread.clear()

        try:
            if attempt is not None and not attempt.over and attempt is not self._failed:
                self._encode(attempt, slots, on_read)
        except Exception as error:
            assert attempt is not None
            self._failed = attempt
            if isinstance(error, SaveFailed):
                attempt.fail(str(error))
            else:
                self._log.exception("coding on GPU %s for rank %d failed", uuid, self._rank)
                attempt.fail(f"coding on GPU {uuid} for rank {self._rank} failed: {error}")
        finally:
            on_read()

    def _encode(self, attempt: NodeAttempt, slots: list[_FilledSlot], on_read: Callable[[], None]) -> None:
        ring = self._device_rings[slots[0].staged.device]
        assert self._encoder is not None
        self._attempt = attempt
        pieces = list[_SlotChunk]()
        self._digests.clear()
        for filled in slots:
            start = ring.address + filled.staged.slot * ring.slot_size
            for chunk in filled.staged.chunks:
                pieces.append(_SlotChunk(chunk.info, start + chunk.start, chunk.nbytes, chunk.planes))
                self._digests[chunk.info] = finish(chunk.sum, chunk.nbytes)
        copied = torch.cuda.current_stream(ring.index).record_event()  # the training process waited for its copies
        announce = functools.partial(self._announce, attempt, slots[0].number)
        self._encoder.encode(ring.index, EncodeRequest(pieces, copied, on_read), announce)

    def _announce(self, attempt: NodeAttempt, number: int, message: CodedLayout | StageCoded) -> None:
        """Pass chunks that are in host memory to the attempt, if their digests are those that the training process took."""
        if isinstance(message, CodedLayout):
            self._layouts[message.device] = Layout(message)
            return
        assert self._slots is not None
        layout = self._layouts[message.device]
        coded = [chunk for arrived in message.arrived for chunk in layout.chunks(arrived)]
        if attempt.over:
            raise SaveFailed("it has failed already")
        for chunk in coded:
            if chunk.digest != self._digests[chunk.info]:
                raise changed_too_early(chunk.info.name)
        attempt.add_coded(self._rank, taken_over(self._slots, coded, number))

    def _take(self) -> int | None:
        """Return a free slot; None after a short wait, in which the attempt began to upload."""
        try:
            return self._free.get(timeout=0.02)
        except queue.Empty:
            assert self._attempt is not None
            self._attempt.flush()
            return None

    def _put_free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._free.put(slot)

    def _free_device_memory(self) -> None:
        try:
            for ring in self._device_rings.values():
                torch.cuda.synchronize(ring.index)
            if self._encoder is not None:
                self._encoder.close()
            for ring in self._device_rings.values():
                ring.close()
            if self._device_rings:
                torch.cuda.empty_cache()  # the node worker goes on, and should not keep unused memory
        except Exception:
            self._log.exception("the GPU memory of rank %d could not be given back", self._rank)

    def _tell(self, message: Message) -> None:
        try:
            self._send(message)
        except RaystowError:
            pass  # the process is gone: its session ends on its own thread


def _index(uuid: str) -> int:
    """Return this process's index of a device; ``ClusterError`` if the device is not visible here."""
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise ClusterError(
            f"the node worker does not see this GPU (of {len(visible)} that it sees)",
            subject=uuid,
            remedy="see CUDA_VISIBLE_DEVICES of the node's Ray processes",
        )
    return visible.index(uuid)
