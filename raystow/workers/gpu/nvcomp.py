"""nvCOMP's batched C interface, bound by ctypes: every call is enqueued on a stream, and nothing waits for the host.

The library comes with the package ``nvidia-libnvcomp-cu12``. Its version is checked: option structures and the streams of its
ANS coder differ between major versions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from typing import Any

import torch

from ...storage.coding.chunk import ANS, DEFLATE, ZSTD
from ...storage.errors import Unsupported
from .kernel_args import Table

MAJOR = 6
ALIGN = 16
"""Addresses of all buffers must be multiples of this; no coder asks for more."""

STREAM = {DEFLATE: 16 << 10, ZSTD: 16 << 10, ANS: 128 << 10}
"""Plane bytes per coded stream: what is lost in size against longer ones is gained in speed, of decoding above all."""

_NAMES = {DEFLATE: "Deflate", ZSTD: "Zstd", ANS: "ANS"}
_ANY_TYPE = 0xFF  # an ANS stream says itself what it holds


class _Options(ctypes.Structure):
    """All option structures are 64 bytes by value. Zeros mean: Deflate with Huffman codes only; ANS of single bytes."""

    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_int), ("rest", ctypes.c_char * 56)]


class _Properties(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("cudart", ctypes.c_uint32)]


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    found = importlib.util.find_spec("nvidia.libnvcomp") if importlib.util.find_spec("nvidia") else None
    if found is None:
        raise Unsupported("nvCOMP is not installed", remedy=f"pip install 'nvidia-libnvcomp-cu12=={MAJOR}.*'")
    folder = next(iter(found.submodule_search_locations or []))
    try:
        library = ctypes.CDLL(os.path.join(folder, "lib64", f"libnvcomp.so.{MAJOR}"))
    except OSError as error:
        raise Unsupported(f"nvCOMP {MAJOR} cannot be loaded: {error}", subject=folder) from error
    properties = _Properties()
    if library.nvcompGetProperties(ctypes.byref(properties)) or properties.version // 1000 != MAJOR:
        raise Unsupported(f"nvCOMP {version_text(properties.version)} is not version {MAJOR}", subject=folder)
    library.nvcompGetStatusString.restype = ctypes.c_char_p
    return library


def version_text(number: int) -> str:
    """A version as nvCOMP counts it (6012 is 6.0.12) in the usual form."""
    return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"


def version() -> str:
    """The version of the library; ``Unsupported`` if there is none that fits."""
    properties = _Properties()
    _library().nvcompGetProperties(ctypes.byref(properties))
    return version_text(properties.version)


class Codec:
    """One of nvCOMP's coders for streams of at most ``stream`` bytes. All tensors live on one device; int64 unless said."""

    def __init__(self, name: str, stream: int) -> None:
        self.name, self.stream = name, stream
        self._library = _library()
        self._prefix = f"nvcompBatched{_NAMES[name]}"
        self._coding = _Options()
        self._decoding = _Options(0, _ANY_TYPE if name == ANS else 0)

    @functools.cached_property
    def stride(self) -> int:
        """Bytes that the coder may write for one stream, rounded up to ``ALIGN``."""
        size = ctypes.c_size_t()
        self._call("CompressGetMaxOutputChunkSize", ctypes.c_size_t(self.stream), self._coding, ctypes.byref(size))
        return -(-size.value // ALIGN) * ALIGN

    def coding_scratch(self, streams: int) -> int:
        """Bytes of scratch that ``compress`` needs for so many streams."""
        return self._scratch("CompressGetTempSize", streams, self._coding)

    def decoding_scratch(self, streams: int) -> int:
        """Bytes of scratch that ``decompress`` needs for so many streams."""
        return self._scratch("DecompressGetTempSize", streams, self._decoding)

    def _scratch(self, what: str, streams: int, options: _Options) -> int:
        size = ctypes.c_size_t()
        count, each = ctypes.c_size_t(streams), ctypes.c_size_t(self.stream)
        self._call(what, count, each, options, ctypes.byref(size), ctypes.c_size_t(streams * self.stream), None)
        return size.value

    def compress(
        self,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        targets: torch.Tensor,
        coded: torch.Tensor,
        *,
        scratch: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Code streams on the current stream of the device: from the addresses ``sources``, ``sizes`` bytes each, to the
        addresses ``targets`` (``stride`` bytes of room each); their coded sizes into ``coded``, 0 into ``status`` (int32) if all
        went well."""
        self._call(
            "CompressAsync",
            _pointer(sources),
            _pointer(sizes),
            ctypes.c_size_t(self.stream),
            ctypes.c_size_t(len(sources)),
            _pointer(scratch),
            ctypes.c_size_t(scratch.numel()),
            _pointer(targets),
            _pointer(coded),
            self._coding,
            _pointer(status),
            _stream(),
        )

    def decompress(
        self,
        sources: Table,
        sizes: Table,
        targets: Table,
        rooms: Table,
        *,
        decoded: Table,
        scratch: torch.Tensor,
        status: Table,
    ) -> None:
        """Decode streams whose digest was checked (a coder may do anything on bytes that are no stream of its own): from
        ``sources``, ``sizes`` bytes each, to ``targets`` with room for ``rooms`` bytes; the decoded sizes into ``decoded``."""
        self._call(
            "DecompressAsync",
            _pointer(sources),
            _pointer(sizes),
            _pointer(rooms),
            _pointer(decoded),
            ctypes.c_size_t(len(sources)),
            _pointer(scratch),
            ctypes.c_size_t(scratch.numel()),
            _pointer(targets),
            self._decoding,
            _pointer(status),
            _stream(),
        )

    def _call(self, what: str, *arguments: Any) -> None:
        code = getattr(self._library, self._prefix + what)(*arguments)
        if code:
            text = self._library.nvcompGetStatusString(code)
            raise RuntimeError(f"{self._prefix}{what}: {text.decode() if text else code}")


def _pointer(tensor: Table) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
