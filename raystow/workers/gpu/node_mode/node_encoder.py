"""Codes in the node worker's process what a training process has copied into device memory: one thread for each such process.

The node worker owns everything here: the rings in device memory, and the slots of pinned host memory that coded chunks go to.
What was announced before a training process died is coded all the same. For the conversation see ``remote_workbench``.
"""

from __future__ import annotations

import functools
import logging
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ....storage.coding import dtypes
from ....storage.coding.chunk import RAW
from ....storage.coding.digest import finish
from ....storage.errors import ClusterError, RaystowError, SaveFailed
from ....storage.log import about
from ...packing.attempt import NodeAttempt, draft
from ...protocol.messages import (
    CheckDevice,
    ChunkInfo,
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
from ...shm.coded_layout import Layout
from ...shm.ring import Ring
from ...shm.slots import Slots
from ..gpu_encoder import GpuEncoder
from ..nvcomp import version
from .device_ring import DeviceRing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chunk:
    """An ``encoder.Source`` in a slot of device memory."""

    staged: DeviceChunk
    address: int

    @property
    def name(self) -> str:
        return self.staged.info.name

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.dtype(self.staged.info.dtype)

    @property
    def nbytes(self) -> int:
        return self.staged.nbytes

    @property
    def planes(self) -> tuple[int, ...]:
        return self.staged.planes

    @property
    def followed(self) -> str:
        return ""  # the training process compares them

    @property
    def identity(self) -> tuple[ChunkInfo, tuple[int, ...]]:
        return self.staged.info, self.staged.planes

    def gather(self) -> torch.Tensor:
        raise AssertionError("chunks in a slot are contiguous")

    def describe(self) -> ChunkInfo:
        return self.staged.info


@dataclass(frozen=True)
class _NodeWork:
    """A slot that the training process has filled."""

    attempt: NodeAttempt | None
    number: int
    staged: StageOnDevice


@dataclass(frozen=True)
class _Device:
    """A GPU by torch's number, the ring on it, and what the training process must see there."""

    index: int
    ring: DeviceRing
    signature: str


class NodeEncoder:
    """See ``session.GpuCoder``. ``ring``: the one in host memory, of which a part is lent; ``send``: to the training process."""

    def __init__(self, ring: Ring, rank: int, send: Callable[[Message], None]) -> None:
        self._ring, self._rank, self._send = ring, rank, send
        self._log = about(logger, rank=rank)
        self._thread = ThreadPoolExecutor(1, "raystow-encode")
        self._devices: dict[str, _Device] = {}
        self._codec = RAW
        self._lent: Ring | None = None
        self._slots: Slots | None = None
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # lent slots
        self._bench: GpuEncoder | None = None
        self._work: deque[_NodeWork] = deque()
        self._layouts: dict[int, Layout] = {}  # of the chunks of each device that were coded last
        self._digests: dict[ChunkInfo, int] = {}  # of the chunks that are being coded, as the training process has read them
        self._attempt: NodeAttempt | None = None  # that of the slots which are being coded
        self._failed: NodeAttempt | None = None

    def ask(self, question: DeviceQuestion) -> None:
        self._thread.submit(self._answer, question)

    def code(self, work: StageOnDevice, attempt: NodeAttempt | None, number: int) -> None:
        self._work.append(_NodeWork(attempt, number, work))
        self._thread.submit(self._code)

    def end(self, attempt: NodeAttempt) -> None:
        self._thread.submit(attempt.finished, self._rank)

    def close(self) -> None:
        self._thread.submit(self._let_go)
        self._thread.shutdown()
        if self._slots is not None and self._lent is not None:
            self._slots.wait()  # until what is coded has been uploaded
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
                    answer = self._borrow(uuid, first)
        except Exception as error:
            if not isinstance(error, RaystowError):
                self._log.exception("GPU %s cannot be used for rank %d", question.device, self._rank)
            answer = DeviceRefused(question.device, str(error) or repr(error))
        self._tell(answer)

    def _open(self, uuid: str, codec: str) -> DeviceOpened:
        """Make a ring on the training process's device, and sign it."""
        index = _index(uuid)
        torch.cuda.set_device(index)
        if codec != RAW:
            version()  # without nvCOMP it is better to know now
        ring = DeviceRing.create(index)
        try:
            self._devices[uuid] = _Device(index, ring, ring.sign())
            self._codec = codec
            return DeviceOpened(uuid, ring.handle(), ring.slots, ring.slot_size)
        except BaseException:
            self._devices.pop(uuid, None)
            ring.close()
            raise

    def _compare(self, uuid: str, seen: str) -> DeviceChecked:
        if seen != self._devices[uuid].signature:
            self._devices.pop(uuid).ring.close()
            raise ClusterError("what the node worker wrote into device memory is not what the training process reads there")
        return DeviceChecked(uuid)

    def _borrow(self, uuid: str, first: int) -> DeviceReady:
        """Take over slots of host memory, with the first device, and choose the codec."""
        if self._lent is None:
            self._lent = self._ring.behind(first)
            self._slots = Slots(self._lent, self._give_back)
            self._give_back(list(range(self._lent.slots)))
        if self._bench is None:
            self._bench = GpuEncoder(self._lent, self._codec, take=self._take, release=self._release)
        choice = self._bench.choice(self._devices[uuid].index)
        return DeviceReady(uuid, choice.codec, f"{choice.why}; coded by the node worker")

    def _code(self) -> None:
        """Code what has been filled by now of a save, and of a device: the more at a time, the faster."""
        works = list[_NodeWork]()
        while self._work and (not works or _alike(works[0], self._work[0])):
            works.append(self._work.popleft())
        if not works:
            return  # coded together with what came before
        attempt, uuid = works[0].attempt, works[0].staged.device
        filled = [work.staged.slot for work in works]

        def free() -> None:
            while filled:
                self._tell(DeviceSlotFree(uuid, filled.pop()))

        try:
            if attempt is not None and not attempt.over and attempt is not self._failed:
                self._encode(attempt, works, free)
        except Exception as error:
            assert attempt is not None
            self._failed = attempt
            if isinstance(error, SaveFailed):
                attempt.fail(str(error))
            else:
                self._log.exception("coding on GPU %s for rank %d failed", uuid, self._rank)
                attempt.fail(f"coding on GPU {uuid} for rank {self._rank} failed: {error}")
        finally:
            free()

    def _encode(self, attempt: NodeAttempt, works: list[_NodeWork], on_read: Callable[[], None]) -> None:
        device = self._devices[works[0].staged.device]
        assert self._bench is not None
        self._attempt = attempt
        ring = device.ring
        chunks = [
            _Chunk(chunk, ring.address + work.staged.slot * ring.slot_size + chunk.start)
            for work in works
            for chunk in work.staged.chunks
        ]
        staged = [chunk for work in works for chunk in work.staged.chunks]
        self._digests = {chunk.info: finish(chunk.sum, chunk.nbytes) for chunk in staged}
        self._bench.encode(
            device.index,
            chunks,
            after=torch.cuda.current_stream(device.index).record_event(),  # the copies into the ring were waited for
            on_read=on_read,
            announce=functools.partial(self._announce, attempt, works[0].number),
        )

    def _announce(self, attempt: NodeAttempt, number: int, message: CodedLayout | StageCoded) -> None:
        """Hand chunks on that lie in host memory now, if they are what the training process has read."""
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
                raise SaveFailed(
                    "the tensor changed while it was being saved",
                    subject=chunk.info.name,
                    remedy="call fence() before anything changes it, or guard(optimizer)",
                )
        for chunk in coded:
            parts, done = self._slots.take_over(chunk.parts)
            attempt.add_coded(self._rank, draft(chunk.info, number, chunk.coding, raw_digest=chunk.digest), parts, done)

    def _take(self) -> int | None:
        """A free slot; None after a moment without one, in which uploads were hurried."""
        try:
            return self._free.get(timeout=0.02)
        except queue.Empty:
            assert self._attempt is not None
            self._attempt.flush()
            return None

    def _release(self, slot: int) -> None:
        assert self._slots is not None
        self._slots.filled(slot)

    def _give_back(self, slots: list[int]) -> None:
        for slot in slots:
            self._free.put(slot)

    def _let_go(self) -> None:
        try:
            for device in self._devices.values():
                torch.cuda.synchronize(device.index)
            if self._bench is not None:
                self._bench.close()
            for device in self._devices.values():
                device.ring.close()
            if self._devices:
                torch.cuda.empty_cache()  # the node worker stays, and should not keep what nobody trains with any more
        except Exception:
            self._log.exception("the GPU memory of rank %d could not be given back", self._rank)

    def _tell(self, message: Message) -> None:
        try:
            self._send(message)
        except RaystowError:
            pass  # the process is gone: its session ends on its own thread


def _index(uuid: str) -> int:
    """This process's number of a device; ``ClusterError`` if the device is not visible here."""
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise ClusterError(
            f"the node worker does not see this GPU (of {len(visible)} that it sees)",
            subject=uuid,
            remedy="see CUDA_VISIBLE_DEVICES of the node's Ray processes",
        )
    return visible.index(uuid)


def _alike(one: _NodeWork, other: _NodeWork) -> bool:
    return one.attempt is other.attempt and one.staged.device == other.staged.device
