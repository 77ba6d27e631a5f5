"""A ring of slots in device memory that a training process fills and its node worker empties.

It is allocated by the CUDA driver and not by torch, because memory of torch's caching allocator cannot always be exported
(with ``expandable_segments:True`` it cannot). The node worker allocates and owns the ring, so a training process that dies leaves
no memory allocated. CUDA IPC cannot open a ring in the process that allocated it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from ....storage.errors import ClusterError
from ....storage.runtime.clock import SYSTEM
from ..kernels.library import DriverError, context

SLOT = 64 << 20
"""Bytes of a slot; the largest chunk must fit."""

SLOTS = 4
"""Slots for each training process and device: while one is encoded the next ones are filled."""

_LAZY_PEER_ACCESS = 1
_MARK = 16  # bytes of a token


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


@functools.cache
def _driver() -> ctypes.CDLL:
    """Return the driver. Calls release the interpreter lock, unlike those of ``library``: some wait for the device."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the driver. Raises ``ClusterError`` with the driver's description of the error."""
    if code := getattr(_driver(), name)(*arguments):
        raise ClusterError(str(DriverError(name, code)))


def _open(handle: _Handle) -> int:
    """Map another process's allocation; return its address here."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


class DeviceRing:
    """``slots`` slots of ``slot_size`` bytes on one device: one process calls ``create``, the other ``open``.

    Attributes:
        index: Torch's index of the device.
        signed: The ``signature`` that every process must read, after ``sign``.
    """

    def __init__(self, device: int, slots: int, slot_size: int, handle: str | None) -> None:
        self.index, self.slots, self.slot_size, self.signed = device, slots, slot_size, ""
        self._device = torch.device("cuda", device)
        self._owned = handle is None
        with self._current():
            if handle is None:
                address = ctypes.c_uint64()
                _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(slots * slot_size))
                self.address = address.value
            else:
                self.address = _open(_Handle.from_buffer_copy(bytes.fromhex(handle)))

    @staticmethod
    def create(device: int, slots: int = SLOTS, slot_size: int = SLOT) -> DeviceRing:
        """Allocate a ring on a device, given by torch's index. Raises ``ClusterError`` if there is not enough memory."""
        return DeviceRing(device, slots, slot_size, None)

    @staticmethod
    def open(device: int, handle: str, slots: int, slot_size: int) -> DeviceRing:
        """Map the ring of another process on this device. Raises ``ClusterError`` if IPC is not permitted."""
        return DeviceRing(device, slots, slot_size, handle)

    def handle(self) -> str:
        """Return the handle for ``open``: 64 bytes in hexadecimal digits."""
        handle = _Handle()
        with self._current():
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle).hex()

    def sign(self) -> None:
        """Write random tokens to both ends of each slot."""
        tokens = "".join(SYSTEM.token() for _ in range(2 * self.slots)).encode()
        marks = torch.frombuffer(bytearray(tokens), dtype=torch.uint8).reshape(self.slots, 2 * _MARK).to(self._device)
        memory = self._memory()
        memory[:, :_MARK], memory[:, -_MARK:] = marks[:, :_MARK], marks[:, _MARK:]
        torch.cuda.current_stream(self._device).synchronize()
        self.signed = tokens.hex()

    def signature(self) -> str:
        """Return the bytes at both ends of each slot, in hexadecimal digits."""
        memory = self._memory()
        return bytes(torch.cat((memory[:, :_MARK], memory[:, -_MARK:]), 1).cpu().numpy()).hex()

    def close(self) -> None:
        """Free the memory, or unmap it. No copy to or from it may be in progress."""
        with self._current():
            _call("cuMemFree_v2" if self._owned else "cuIpcCloseMemHandle", ctypes.c_uint64(self.address))

    def _memory(self) -> torch.Tensor:
        """Return the ring as a tensor of bytes with a row for each slot."""
        shape = (self.slots * self.slot_size,)
        described = {"shape": shape, "typestr": "|u1", "data": (self.address, False), "version": 2}
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=self._device)
        return memory.view(self.slots, -1)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current for driver calls of this thread."""
        _call("cuCtxPushCurrent_v2", context(self._device.index))
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
