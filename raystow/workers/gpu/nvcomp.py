"""Bindings to nvCOMP's batched C interface by ctypes. Every call is enqueued on a CUDA stream and returns at once.

The library is in the package ``nvidia-libnvcomp-cu12``. Its version is checked, because option structures and ANS streams differ
between major versions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os

import torch

from ...storage.coding.chunk import ANS, DEFLATE, ZSTD
from ...storage.errors import MissingDependency, Unsupported
from .kernel_args import Addressed, Table

MAJOR = 6
ALIGN = 16
"""Addresses of all buffers must be multiples of this number of bytes."""

STREAM = {DEFLATE: 16 << 10, ZSTD: 16 << 10, ANS: 128 << 10}
"""Bytes of a plane in each coded stream. Longer streams are smaller in total, but are coded and decoded more slowly."""

_NAMES = {DEFLATE: "Deflate", ZSTD: "Zstd", ANS: "ANS"}
_ANY_TYPE = 0xFF  # ANS streams contain their type


class _Options(ctypes.Structure):
    """An option structure: 64 bytes by value. Zeros select Deflate with Huffman codes only, and ANS of single bytes."""

    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_int), ("rest", ctypes.c_char * 56)]


@functools.cache
def _library() -> tuple[ctypes.CDLL, str]:
    """Return the library and its version."""
    found = importlib.util.find_spec("nvidia.libnvcomp") if importlib.util.find_spec("nvidia") else None
    if found is None:
        raise MissingDependency("nvCOMP is not installed", remedy='pip install "raystow[gpu]"')
    folder = next(iter(found.submodule_search_locations or []))
    try:
        library = ctypes.CDLL(os.path.join(folder, "lib64", f"libnvcomp.so.{MAJOR}"))
    except OSError as error:
        raise Unsupported(f"nvCOMP {MAJOR} cannot be loaded: {error}", subject=folder) from error
    properties = (ctypes.c_uint32 * 2)()  # the versions of nvCOMP and of the CUDA runtime
    failed, number = library.nvcompGetProperties(properties), properties[0]
    text = f"{number // 1000}.{number % 1000 // 100}.{number % 100}"  # 6012 is 6.0.12
    if failed or number // 1000 != MAJOR:
        raise Unsupported(f"nvCOMP {text} is not version {MAJOR}", subject=folder)
    library.nvcompGetStatusString.restype = ctypes.c_char_p
    return library, text


def version() -> str:
    """Return the version of the library. Raises ``Unsupported`` if it is missing or has another major version."""
    return _library()[1]


class Codec:
    """One of nvCOMP's codecs, for streams of at most ``stream`` bytes.

    Arguments are tensors or tables on one device: int64 with an element for each stream, unless stated otherwise. Calls are
    enqueued on the current stream.
    """

    def __init__(self, name: str, stream: int) -> None:
        self.name, self.stream = name, stream
        self._library, _ = _library()
        self._prefix = f"nvcompBatched{_NAMES[name]}"
        self._coding = _Options()
        self._decoding = _Options(0, _ANY_TYPE if name == ANS else 0)

    @functools.cached_property
    def stride(self) -> int:
        """The most bytes that the coder may write for one stream, rounded up to ``ALIGN``."""
        size = ctypes.c_size_t()
        self._call("CompressGetMaxOutputChunkSize", self.stream, self._coding, ctypes.byref(size))
        return -(-size.value // ALIGN) * ALIGN

    def coding_scratch(self, streams: int) -> int:
        """Return the bytes of scratch memory that ``compress`` needs for so many streams."""
        return self._scratch("CompressGetTempSize", streams, self._coding)

    def decoding_scratch(self, streams: int) -> int:
        """Return the bytes of scratch memory that ``decompress`` needs for so many streams."""
        return self._scratch("DecompressGetTempSize", streams, self._decoding)

    def _scratch(self, function: str, streams: int, options: _Options) -> int:
        size = ctypes.c_size_t()
        self._call(function, streams, self.stream, options, ctypes.byref(size), streams * self.stream, None)
        return size.value

    def compress(
        self, sources: Table, sizes: Table, targets: Table, coded: Table, *, scratch: torch.Tensor, status: torch.Tensor
    ) -> None:
        """Code streams from the addresses ``sources``, ``sizes`` bytes each, to the addresses ``targets``, every one with
        ``stride`` bytes of memory. ``coded`` receives their coded sizes, ``status`` (int32) 0 for each success."""
        memory, stream = (scratch, scratch.numel()), _current_stream()
        self._call(
            "CompressAsync", sources, sizes, self.stream, len(sources), *memory, targets, coded, self._coding, status, stream
        )

    def decompress(
        self, sources: Table, sizes: Table, targets: Table, most: Table, *, decoded: Table, scratch: torch.Tensor, status: Table
    ) -> None:
        """Decode streams whose digest was checked; on other bytes a decoder's behaviour is undefined.

        ``sources``, ``sizes``, ``targets`` and ``status`` are as for ``compress``; ``most``: the memory at each target in bytes;
        ``decoded`` receives the decoded sizes.
        """
        memory, stream = (scratch, scratch.numel()), _current_stream()
        self._call(
            "DecompressAsync", sources, sizes, most, decoded, len(sources), *memory, targets, self._decoding, status, stream
        )

    def _call(self, function: str, *arguments: object) -> None:
        """Call a function of this codec. Integers are passed as ``size_t``, tensors and tables as addresses."""
        code = getattr(self._library, self._prefix + function)(*map(_argument, arguments))
        if code:
            text = self._library.nvcompGetStatusString(code)
            raise RuntimeError(f"{self._prefix}{function}: {text.decode() if text else code}")


def _argument(value: object) -> object:
    if isinstance(value, int):
        return ctypes.c_size_t(value)
    if isinstance(value, torch.Tensor | Addressed):
        return ctypes.c_void_p(value.data_ptr())
    return value


def _current_stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
