"""Loads kernels that were compiled ahead of time and launches them through the CUDA driver. Needs neither Triton nor a compiler.

``binaries`` has a file for each architecture: cubins, and PTX that the driver compiles for architectures that have none. A kernel
is loaded at its first launch on a device.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

import torch
import zstandard

from ....storage.errors import Unsupported
from ..kernel_args import Addressed
from .constants import Value

FORMAT = 1
PTX = "ptx"
"""The file with PTX."""
SHIPPED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", PTX)
"""The names of all files."""
_OLDEST = 8  # major version of the compute capability that the PTX is for
_MOST = 64 << 20  # bytes of a file, uncompressed
_TYPES = {"*": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32}
_TOO_NEW = (209, 218, 222)  # no binary for this GPU; PTX that the driver cannot compile, or does not know


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Args:
        name: Its module, function and constants.
        entry: The name of the function in the image.
        arguments: For each argument ``*`` (an address), ``q`` (a 64-bit integer) or ``i`` (a 32-bit integer).
        threads: Threads of a program.
        shared: Bytes of dynamic shared memory.
        image: The cubin or PTX.
    """

    name: str
    entry: str
    arguments: str
    threads: int
    shared: int
    image: bytes


def variant_name(name: str, constants: Mapping[str, Value]) -> str:
    """Return the name of a kernel compiled with some constants."""
    return " ".join([name, *(f"{key}={constants[key]}" for key in sorted(constants))])


def sources_digest() -> str:
    """Return the SHA-256 of everything that determines the binaries: the sources, and the constants."""
    folder = resources.files(__package__)
    files = [
        folder / "constants.py",
        *sorted((f for f in (folder / "sources").iterdir() if f.name.endswith(".py")), key=lambda f: f.name),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def pack(sources: str, compiler: str, binaries: Iterable[Binary]) -> bytes:
    """Return the file for some kernels. ``sources``: the digest of their sources; ``compiler``: its name and version."""
    rows, images = list[object](), b""
    for one in binaries:
        rows.append([one.name, one.entry, one.arguments, one.threads, one.shared, len(images), len(one.image)])
        images += one.image
    index = json.dumps({"format": FORMAT, "sources": sources, "compiler": compiler, "kernels": rows}).encode()
    return zstandard.ZstdCompressor(level=19, write_checksum=True).compress(struct.pack("<I", len(index)) + index + images)


class Architecture:
    """The kernels of one file.

    Attributes:
        name: Its name: ``sm_90``, or ``ptx``.
        sources: The digest of the sources that they were compiled from.
        compiler: The name and version of the compiler.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        file = resources.files(__package__) / "binaries" / f"{name}.zst"
        data = zstandard.ZstdDecompressor().decompress(file.read_bytes(), max_output_size=_MOST)
        end = 4 + struct.unpack_from("<I", data)[0]
        index = json.loads(data[4:end])
        if index["format"] != FORMAT:
            raise Unsupported("the compiled kernels have an unknown format", subject=name, remedy="install raystow again")
        self.sources, self.compiler = str(index["sources"]), str(index["compiler"])
        self._rows = {row[0]: row[1:] for row in index["kernels"]}
        self._images = memoryview(data)[end:]

    def names(self) -> frozenset[str]:
        """Return the names of all kernels."""
        return frozenset(self._rows)

    def binary(self, name: str) -> Binary:
        """Return a kernel by its name."""
        entry, arguments, threads, shared, start, size = self._rows[name]
        return Binary(name, entry, arguments, threads, shared, bytes(self._images[start : start + size]))


@functools.cache
def architecture(device: int) -> Architecture:
    """Return the kernels for a device: its own, those of an earlier minor version, or PTX. ``Unsupported`` if it is too old."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < _OLDEST:
        what = f"raystow's kernels need compute capability {_OLDEST}.0; this GPU has compute capability {major}.{minor}"
        raise Unsupported(what, subject=f"cuda:{device}", remedy='save with Compression("cpu")')
    for lower in range(minor, -1, -1):
        if (resources.files(__package__) / "binaries" / f"sm_{major}{lower}.zst").is_file():
            return Architecture(f"sm_{major}{lower}")
    return Architecture(PTX)


class Kernel:
    """A kernel, by its module and function in ``sources``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, grid: tuple[int, ...], *arguments: torch.Tensor | Addressed | int, **constants: Value) -> None:
        """Enqueue the kernel on the current stream of the current device, with a program for each point of ``grid``."""
        device = torch.cuda.current_device()
        launch = _loaded(device, _variant(self.name, tuple(constants.items())))
        launch(grid, arguments, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _variant(name: str, constants: tuple[tuple[str, Value], ...]) -> str:
    return variant_name(name, dict(constants))


@functools.cache
def _loaded(device: int, variant: str) -> Callable[[tuple[int, ...], tuple[torch.Tensor | Addressed | int, ...], int], None]:
    """Load a kernel into the memory of a device; return what launches it: with a grid, arguments and a stream."""
    binary, here = architecture(device).binary(variant), context(device)
    types, threads, shared = [_TYPES[kind] for kind in binary.arguments], binary.threads, binary.shared
    _call("cuCtxSetCurrent", here)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        _call("cuModuleLoadData", ctypes.byref(module), binary.image)
    except DriverError as error:
        if error.code not in _TOO_NEW:
            raise
        what = f"the driver cannot load raystow's GPU kernels: {error}"
        raise Unsupported(what, subject=binary.name, remedy="update the NVIDIA driver") from error
    _call("cuModuleGetFunction", ctypes.byref(function), module, binary.entry.encode())
    if shared > 48 << 10:  # more must be asked for
        _call("cuFuncSetAttribute", function, ctypes.c_int(8), ctypes.c_int(shared))

    def launch(grid: tuple[int, ...], arguments: tuple[torch.Tensor | Addressed | int, ...], stream: int) -> None:
        values = [
            kind(value if isinstance(value, int) else value.data_ptr()) for kind, value in zip(types, arguments, strict=True)
        ]
        values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # Triton's scratch memory, which no kernel uses
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        x, y, z = (*grid, 1, 1)[:3]
        _call("cuCtxSetCurrent", here)
        _call(*("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared, ctypes.c_void_p(stream), pointers, None))

    return launch


def copy_to_host(target: int, source: int, nbytes: int) -> None:
    """Enqueue a copy from an address in device memory to one in pinned memory, on the current stream of the current device.

    Unlike a copy of tensors it keeps the interpreter lock: see ``kernel_args.Addressed``.
    """
    _copy("cuMemcpyDtoHAsync_v2", target, source, nbytes)


def copy_to_device(target: int, source: int, nbytes: int) -> None:
    """Enqueue a copy in the other direction."""
    _copy("cuMemcpyHtoDAsync_v2", target, source, nbytes)


def copy_on_device(target: int, source: int, nbytes: int) -> None:
    """Enqueue a copy between addresses in device memory."""
    _copy("cuMemcpyDtoDAsync_v2", target, source, nbytes)


def _copy(function: str, target: int, source: int, nbytes: int) -> None:
    if nbytes:
        _enqueue(function, *map(ctypes.c_uint64, (target, source)), ctypes.c_size_t(nbytes))


def record(event: torch.cuda.Event) -> None:
    """Record an event again, on the current stream. Unlike torch's function it keeps the interpreter lock."""
    _enqueue("cuEventRecord", ctypes.c_void_p(event.cuda_event))


def _enqueue(function: str, *arguments: object) -> None:
    """Call a function whose last argument is the stream."""
    device = torch.cuda.current_device()
    _call("cuCtxSetCurrent", context(device))
    _call(function, *arguments, ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)))


def load_all(device: torch.device) -> None:
    """Load every kernel now: the driver takes about a millisecond for each at its first launch."""
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        for variant in architecture(index).names():
            _loaded(index, variant)


class DriverError(RuntimeError):
    """An error of the CUDA driver. ``code``: its number."""

    def __init__(self, function: str, code: int) -> None:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        super().__init__(f"{function}: {text.value.decode() if text.value else code}")
        self.code = code


def _call(function: str, *arguments: object) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise DriverError(function, code)


@functools.cache
def _driver() -> ctypes.PyDLL:
    """Return the driver. Calls keep the interpreter lock: they take microseconds, and to get it back would take longer."""
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"the NVIDIA driver cannot be loaded: {error}") from error


@functools.cache
def context(device: int) -> ctypes.c_void_p:
    """Return the context that torch uses on a device."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context
