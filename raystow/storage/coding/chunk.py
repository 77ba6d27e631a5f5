"""The unit of compression and of range reads: some MiB of one tensor, split into byte planes, each plane coded or left alone.

After a float's sign bit is rotated out of the way, the topmost byte of each word holds the exponent and codes to about 0.3 of
its size; the bytes below are noise and are stored as they are. Which plane is worth coding, and how, is decided per chunk from
a sample. In the pack the raw planes come first, then the coded ones, each in ascending order.

A chunk may be stored as a delta to the same chunk of an earlier version, where that codes better (``base``).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import Damaged, Unsupported
from . import kernels, zstd
from .dtypes import DType
from .kernels import Bytes

STREAM = 32 << 10
"""Plane bytes per coded stream, on the CPU: short, since every layer has its own distribution of exponents, and every stream its
own Huffman code; still shorter ones gain little and decode slower. A reader goes by what the chunk says: streams coded on a GPU
may be of another size."""

RAW, ZSTD, DEFLATE, PACK7, ANS = "raw", "zstd", "deflate", "pack7", "ans"

SMALL = 1024
"""Bytes; in a smaller chunk a stream's header costs more than coding saves."""

WORTH = 7.95
"""Bits per byte; above, a plane is noise."""

Sizes = npt.NDArray[np.int32]

_SIZE = np.dtype("<i4")
_KEPT = 16 << 20  # bytes of scratch that a decoding thread keeps; for larger chunks they are not worth keeping
_SAMPLE = 64  # pieces of 64 words, evenly spread


class Coding(msgspec.Struct, frozen=True):
    """How a chunk's bytes are stored in its pack.

    ``planes``: False for bytes as they are (then there is one plane). ``rotated``: words were rotated left by one bit. ``base``:
    the words are differences to those of this version; see ``kernels.subtract``.
    ``codecs`` and ``stored``: one entry per plane, the least significant first; ``stored`` in bytes. ``streams``: the sizes in
    bytes of the coded streams of all streamed planes, in the order of storage, as ``packed`` gives them, since there are very
    many; every stream decodes to ``stream`` bytes of its plane, the last one to the rest. Copy it with
    ``msgspec.structs.replace``.
    """

    planes: bool
    rotated: bool
    codecs: tuple[str, ...]
    stored: tuple[int, ...]
    streams: bytes = b""
    stream: int = 64 << 10
    base: int | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the chunk has no bytes in a pack: they are those of the same chunk of version ``base``."""
        return self.base is not None and not self.codecs

    @property
    def size(self) -> int:
        """Bytes in the pack."""
        return sum(self.stored)

    @property
    def sizes(self) -> Sizes:
        """Of the streams."""
        return np.frombuffer(self.streams, _SIZE)


def packed(sizes: Iterable[int]) -> bytes:
    """The sizes of streams in four bytes each, little-endian."""
    return np.fromiter(sizes, _SIZE).tobytes()


def reference(base: int) -> Coding:
    """The coding of a chunk whose bytes are those of the same chunk of version ``base``."""
    return Coding(False, False, (), (), base=base)


class ChunkEncoder:
    """Encodes chunks of up to ``capacity`` bytes, with as much scratch memory. One for each thread."""

    def __init__(self, capacity: int) -> None:
        self._planes = np.empty(capacity, np.uint8)
        self._literals = zstd.ZstdEncoder(zstd.LITERALS)
        self._matches = zstd.ZstdEncoder(zstd.MATCHES)

    def encode(self, raw: Bytes, dtype: DType) -> tuple[Bytes, Coding]:
        """The bytes to store for a contiguous uint8 array, in new memory, and their description."""
        width = dtype.width
        codecs = self._choose(raw.view(kernels.WORDS[width]), dtype.rotate) if raw.size >= SMALL else [RAW]
        if set(codecs) == {RAW}:
            return raw.copy(), Coding(False, False, (RAW,), (raw.size,))
        out = np.empty(raw.size + 512 * (raw.size // STREAM + 16), np.uint8)  # zstd may add some bytes per frame
        stored, streams = self._encode_planes(raw, dtype, codecs, out)
        out.resize(sum(stored), refcheck=False)  # returns unused memory: no view of it is left
        return out, Coding(width > 1, dtype.rotate, tuple(codecs), tuple(stored), packed(streams), STREAM)

    def _encode_planes(self, raw: Bytes, dtype: DType, codecs: list[str], out: Bytes) -> tuple[list[int], list[int]]:
        """Fill ``out``; the bytes of each plane in it, and the sizes of all streams. A codec that turns out not to fit is
        replaced in ``codecs``."""
        width = dtype.width
        n = raw.size // width
        kept, coded = [p for p in range(width) if codecs[p] == RAW], [p for p in range(width) if codecs[p] != RAW]
        planes = {p: out[i * n : (i + 1) * n] for i, p in enumerate(kept)}
        planes.update({p: self._planes[i * n : (i + 1) * n] for i, p in enumerate(coded)})
        if width == 1:
            planes[0] = raw
        else:
            kernels.split(raw.view(kernels.WORDS[width]), dtype.rotate, tuple(planes[p] for p in range(width)))
        stored, streams, end = [n] * width, [], len(kept) * n
        for p in coded:
            if codecs[p] == PACK7 and np.bitwise_or.reduce(planes[p]) & 1:
                codecs[p] = ZSTD  # the sample held no odd byte, but the plane does
            sizes = self._code(codecs[p], planes[p], out[end:])
            stored[p] = sum(sizes)
            streams += sizes if codecs[p] == ZSTD else []
            end += stored[p]
        return stored, streams

    def _choose(self, words: kernels.Words, rotate: bool) -> list[str]:
        """A codec for each plane, from a sample."""
        return [self._choose_one(plane, words.size) for plane in _split(sample(words), rotate)]

    def _choose_one(self, sample: Bytes, n: int) -> str:
        entropy = _entropy(sample)
        if entropy > WORTH:
            return RAW
        # Seven random bits and a constant one: dense packing is as small as Huffman codes, and far faster.
        return PACK7 if entropy > 6.8 and n % 8 == 0 and not np.bitwise_or.reduce(sample) & 1 else ZSTD

    def _code(self, codec: str, plane: Bytes, out: Bytes) -> list[int]:
        """Code one plane into ``out``; the sizes of its streams."""
        if codec == PACK7:
            kernels.pack7(plane, out)
            return [plane.size // 8 * 7]
        return self._better(plane, out).encode(plane, STREAM, out)

    def _better(self, plane: Bytes, scratch: Bytes) -> zstd.ZstdEncoder:
        """Literals or matches, by trying both on 16 KiB from the middle. Matches take three times as long to code and twice
        as long to decode: they must win by 5 %."""
        sample = plane[plane.size // 2 :][: 16 << 10]
        literals, matches = (sum(e.encode(sample, STREAM, scratch)) for e in (self._literals, self._matches))
        return self._matches if matches < 0.95 * literals else self._literals


def sample(words: kernels.Words) -> kernels.Words:
    """Some 4,096 words, spread over a chunk's."""
    step = max(64, words.size // _SAMPLE)
    return words[: words.size // step * step].reshape(-1, step)[:, :64].ravel()


def expected(words: kernels.Words, rotate: bool) -> float:
    """Bits that a word of this sample should take when it is coded."""
    entropies = map(_entropy, _split(words, rotate))
    return sum(8.0 if entropy > WORTH else entropy for entropy in entropies)


def _split(words: kernels.Words, rotate: bool) -> tuple[Bytes, ...]:
    if words.itemsize == 1:
        return (words,)
    planes = tuple(np.empty(words.size, np.uint8) for _ in range(words.itemsize))
    kernels.split(words, rotate, planes)
    return planes


def _entropy(sample: Bytes) -> float:
    """Bits per byte of a sample's histogram, with the Miller-Madow correction for its size."""
    counts = np.bincount(sample, minlength=256)
    p = counts[counts > 0] / sample.size
    return float(-(p * np.log2(p)).sum() + (p.size - 1) / (2 * sample.size * np.log(2)))


_NONE: Sizes = np.empty(0, _SIZE)


class Plane(NamedTuple):
    """Where one plane of a chunk lies in its stored bytes, and the sizes of its streams."""

    number: int
    codec: str
    start: int
    size: int
    sizes: Sizes


def layout(coding: Coding, dtype: DType, nbytes: int, stored: int) -> list[Plane]:
    """The planes of a chunk of ``nbytes``, in the order of storage; ``Damaged`` if the description does not fit the sizes,
    ``Unsupported`` if it names an unknown codec."""
    width = dtype.width if coding.planes else 1
    n, rest = divmod(nbytes, width)
    if rest or len(coding.codecs) != width or len(coding.stored) != width or coding.size != stored or coding.stream < 1:
        raise Damaged("the chunk's description does not fit its size")
    planes, end, streams, count = list[Plane](), 0, coding.sizes, -(-n // coding.stream)
    for p in sorted(range(width), key=lambda p: coding.codecs[p] != RAW):
        codec, size, sizes = coding.codecs[p], coding.stored[p], _NONE
        if codec == RAW:
            if size != n:
                raise Damaged(f"a raw plane of {size} bytes where {n} were expected")
        elif codec == PACK7:
            if n % 8 or size != n // 8 * 7:
                raise Damaged("a packed plane of the wrong size")
        elif codec in STREAMED:
            sizes, streams = streams[:count], streams[count:]
            if len(sizes) != count or np.add.reduce(sizes) != size or np.minimum.reduce(sizes, initial=1) < 1:
                raise Damaged("the sizes of the streams do not add up to the plane")
        else:
            raise Unsupported(f"codec {codec!r} is not known here", remedy="upgrade raystow")
        planes.append(Plane(p, codec, end, size, sizes))
        end += size
    if len(streams):
        raise Damaged("the chunk's description names more streams than its planes have")
    return planes


def decode(coding: Coding, dtype: DType, stored: Bytes, raw: Bytes, base: Bytes | None = None) -> None:
    """Decode ``stored`` (uint8, its digest checked by the caller) into ``raw`` (uint8, contiguous, exactly the chunk's bytes).
    ``base``: of a delta, the bytes of the chunk that it is a delta to.

    Raises ``Damaged`` if the description does not fit the bytes, ``Unsupported`` for a codec this reader lacks. Allocates
    no more than the chunk's own size.
    """
    places = layout(coding, dtype, raw.size, stored.size)
    n = raw.size // len(places)
    coded = sum(place.codec != RAW for place in places)
    scratch = iter((raw if len(places) == 1 else _scratch(coded * n)).reshape(-1, n) if n else [raw] * coded)
    planes: dict[int, Bytes] = {}
    for place in places:
        piece = stored[place.start : place.start + place.size]
        if place.codec == RAW:
            planes[place.number] = piece
        else:
            planes[place.number] = next(scratch)
            _decode_plane(place, piece, planes[place.number], coding.stream)
    if len(places) > 1:
        kernels.join(tuple(planes[p] for p in range(len(places))), coding.rotated, raw.view(kernels.WORDS[len(places)]))
    elif places[0].codec == RAW:
        raw[:] = planes[0]
    if coding.base is not None:
        if base is None or base.size != raw.size:
            raise Unsupported(f"the chunk is a delta to one of version {coding.base}, which is not available")
        if raw.size % dtype.width:
            raise Damaged("the chunk's description does not fit its size")
        word = kernels.WORDS[dtype.width]
        kernels.add(raw.view(word), base.view(word))


_local = threading.local()


def _scratch(size: int) -> Bytes:
    """This thread's memory for decoded planes, kept from chunk to chunk: fresh pages cost a third of what decoding does."""
    memory: Bytes | None = getattr(_local, "memory", None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.uint8)
        if size <= _KEPT:
            _local.memory = memory
    return memory[:size]


def _decode_plane(place: Plane, coded: Bytes, plane: Bytes, stream: int) -> None:
    if place.codec == PACK7:
        kernels.unpack7(coded, plane)
    else:
        STREAMED[place.codec](coded, place.sizes, stream, plane)


def _inflate(coded: Bytes, sizes: Sizes, stream: int, plane: Bytes) -> None:
    """Plain Deflate, RFC 1951, as nvCOMP writes it on the GPU."""
    end = 0
    for i, size in enumerate(sizes.tolist()):
        _inflate_stream(coded[end : end + size], plane[i * stream : (i + 1) * stream])
        end += size


def _refuse_ans(coded: Bytes, sizes: Sizes, stream: int, plane: Bytes) -> None:
    raise Unsupported(f"codec {ANS!r} is decoded by nvCOMP on a GPU only", remedy="restore on a machine that has one")


def _inflate_stream(source: Bytes, target: Bytes) -> None:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        decoded = inflater.decompress(source.data, target.size + 1)  # one byte more than valid streams have
    except zlib.error as error:
        raise Damaged(f"deflate: {error}") from error
    if len(decoded) != target.size or not inflater.eof:
        raise Damaged(f"deflate: a stream of {len(decoded)} bytes, or one without an end, where {target.size} were expected")
    target[:] = np.frombuffer(decoded, np.uint8)


STREAMED: dict[str, Callable[[Bytes, Sizes, int, Bytes], None]] = {ZSTD: zstd.decode, DEFLATE: _inflate, ANS: _refuse_ans}
"""The codecs whose planes are made of streams, each with the host's decoder of a plane: it gets the coded bytes, the sizes of the
streams, the bytes that each of them but the last decodes to, and the plane to fill."""
