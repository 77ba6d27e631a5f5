"""Device memory that a training process fills and its node worker empties: a few slots, allocated once, exported once, recycled.

Through the driver and not through torch: torch's caching allocator may hold what is no allocation of the driver's (with
``expandable_segments:True`` it does), and such memory cannot be exported. The node worker allocates and owns the ring, so a
training process that dies leaves nothing behind. CUDA IPC refuses to open a ring in the process that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from ....storage.clock import SYSTEM
from ....storage.errors import ClusterError

SLOT = 64 << 20
"""Bytes of a slot; the largest chunk must fit."""

SLOTS = 4
"""Slots for each training process and device: while one is coded the next ones are filled."""

_LAZY_PEER_ACCESS = 1
_MARK = 16  # bytes of a token


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _View:
    """Raw device memory, in the terms in which torch takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ClusterError(f"there is no NVIDIA driver here: {error}") from error
    driver.cuInit(0)  # torch has done it before; again is harmless
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver's; ``ClusterError`` with its name for what went wrong."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise ClusterError(f"{name}: {text.value.decode() if text.value else 'error'} ({code})")


def _open(handle: _Handle) -> int:
    """The address at which another process's allocation is mapped here."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


class DeviceRing:
    """``slots`` slots of ``slot_size`` bytes on one device. Made by ``create`` in one process and by ``open`` in another."""

    def __init__(self, device: int, slots: int, slot_size: int, handle: str | None) -> None:
        self.slots, self.slot_size = slots, slot_size
        self._device = torch.device("cuda", device)
        self._owned = handle is None
        self._number = ctypes.c_int()
        self._context = ctypes.c_void_p()  # the device's primary one, which torch uses as well
        self.address = 0
        _call("cuDeviceGet", ctypes.byref(self._number), ctypes.c_int(device))
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        try:
            with self._current():
                if handle is None:
                    address = ctypes.c_uint64()
                    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(slots * slot_size))
                    self.address = address.value
                else:
                    self.address = _open(_Handle.from_buffer_copy(bytes.fromhex(handle)))
        except BaseException:
            _call("cuDevicePrimaryCtxRelease_v2", self._number)
            raise

    @staticmethod
    def create(device: int, slots: int = SLOTS, slot_size: int = SLOT) -> DeviceRing:
        """A ring of this process's own, on a device by torch's number; ``ClusterError`` if there is no memory for it."""
        return DeviceRing(device, slots, slot_size, None)

    @staticmethod
    def open(device: int, handle: str, slots: int, slot_size: int) -> DeviceRing:
        """The ring that another process has made on this device; ``ClusterError`` where IPC is not permitted."""
        return DeviceRing(device, slots, slot_size, handle)

    def handle(self) -> str:
        """What ``open`` needs: 64 bytes in hexadecimal digits."""
        handle = _Handle()
        with self._current():
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle).hex()

    def sign(self) -> str:
        """Write fresh random tokens to both ends of each slot; what ``signature`` must give in every process."""
        tokens = "".join(SYSTEM.token() for _ in range(2 * self.slots)).encode()
        marks = torch.frombuffer(bytearray(tokens), dtype=torch.uint8).reshape(self.slots, 2 * _MARK).to(self._device)
        memory = self._memory()
        memory[:, :_MARK], memory[:, -_MARK:] = marks[:, :_MARK], marks[:, _MARK:]
        torch.cuda.current_stream(self._device).synchronize()
        return tokens.hex()

    def signature(self) -> str:
        """What stands at both ends of each slot."""
        memory = self._memory()
        return bytes(torch.cat((memory[:, :_MARK], memory[:, -_MARK:]), 1).cpu().numpy()).hex()

    def write(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy from an address on the same device to ``to``, an address in the ring, on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with self._current():
            _call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream)

    def close(self) -> None:
        """Free the memory, or unmap it. Nothing may be under way in it."""
        with self._current():
            _call("cuMemFree_v2" if self._owned else "cuIpcCloseMemHandle", ctypes.c_uint64(self.address))
        _call("cuDevicePrimaryCtxRelease_v2", self._number)

    def _memory(self) -> Any:
        """The ring as a torch tensor of bytes, a row for each slot."""
        return torch.as_tensor(_View(self.address, self.slots * self.slot_size), device=self._device).view(self.slots, -1)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Driver calls of this thread go to the device's context."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
