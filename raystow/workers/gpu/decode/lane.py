"""The memory and the stream of a lane. Its copies and events are calls of the driver, which keep the interpreter lock."""

from __future__ import annotations

import torch

from ..kernel_args import Addressed, part
from ..kernels import library
from ..pinned_memory import BUFFERS
from .lane_plan import ROOM, LaneMemory

_NUMBERS, _SCRATCH = 1 << 16, 16 << 20  # numbers, and bytes of scratch memory, that are enough for most plans


class Lane:
    """The parts of ``lane_plan.LaneMemory``, memory for the numbers of a plan (its tables, then their results) on both sides, and
    ``scratch``, which the lane's kernels use one after the other.

    All are allocated on the current stream, which the lane must then ``follow``.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self._device = torch.cuda.Stream(device), device
        self.event = self.stream.record_event()  # after the work that was enqueued last
        sizes = ROOM.stored, ROOM.planes, ROOM.aligned, 0, _SCRATCH
        self.stored, self.planes, self._aligned, self.words, self.scratch = map(self._allocate, sizes)
        self._allocate_numbers(_NUMBERS)
        self.pinned = BUFFERS.take(ROOM.stored)  # at last: a lane without device memory would not give it back
        self.bytes = self.pinned.memory
        self._address = self.bytes.ctypes.data

    def close(self) -> None:
        """Free the memory, also if the traceback of an error refers to the lane for longer."""
        BUFFERS.give_back(self.pinned)
        del self.stored, self.planes, self._aligned, self.words, self.scratch

    @property
    def memory(self) -> LaneMemory:
        """The address of each part."""
        return LaneMemory(*(one.data_ptr() for one in (self.stored, self.planes, self._aligned, self.words)))

    def follow(self) -> None:
        """Let the lane's stream wait for earlier work of the current one."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def reserve(self, *, words: int = 0, scratch: int = 0, numbers: int = 0) -> None:
        """Enlarge memory that is too small, and not in use: of ``words`` and ``scratch`` in bytes."""
        short = self.words.numel() < words, self.scratch.numel() < scratch, len(self.numbers) < numbers
        if short[0]:
            self.words = self._allocate(words)
        if short[1]:
            self.scratch = self._allocate(scratch)
        if short[2]:
            self._allocate_numbers(numbers)
        if any(short):
            self.follow()

    def placed(self, start: int, rows: int) -> Addressed:
        """Return the numbers from ``start`` on as an argument of a kernel."""
        return part(self._on_device, start, rows)

    def send_stored(self, nbytes: int) -> None:
        """Enqueue the copy of fetched bytes to the device, on the current stream."""
        self.pinned.wait(0)
        library.copy_to_device(self.stored.data_ptr(), self._address, nbytes)

    def write(self, start: int, data: bytes) -> None:
        """Set the numbers from ``start`` on, on the host. numpy would release the interpreter lock."""
        self._bytes[8 * start : 8 * start + len(data)] = data

    def send_numbers(self, count: int) -> None:
        """Enqueue the copy of the first numbers to the device, on the current stream."""
        library.copy_to_device(self._on_device.data_ptr(), self._numbers_address, 8 * count)

    def receive_numbers(self, start: int, end: int) -> None:
        """Enqueue the copy of some numbers to the host, on the current stream."""
        library.copy_to_host(self._numbers_address + 8 * start, self._on_device.data_ptr() + 8 * start, 8 * (end - start))

    def record(self) -> None:
        """Mark the end of the work that has been enqueued. The current stream must be the lane's."""
        library.record(self.event)

    def wait(self) -> None:
        """Wait for that work. A query keeps the interpreter lock."""
        if not self.event.query():
            self.event.synchronize()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _allocate_numbers(self, count: int) -> None:
        self._on_device = torch.empty(count, dtype=torch.int64, device=self._device)  # first: if it fails, nothing has changed
        self.numbers = torch.empty(count, dtype=torch.int64, pin_memory=True).numpy()
        self._bytes = self.numbers.data.cast("B")
        self._numbers_address = self.numbers.ctypes.data
