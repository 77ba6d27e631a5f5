"""Chunks of an earlier version as CPUs and GPUs code them, and their planes as the tables say that a GPU finds them."""

from __future__ import annotations

import zlib

import numpy as np
from host_encoder import deflated

from raystow.storage.coding import kernels, zstd
from raystow.storage.coding.chunk import DEFLATE, RAW, ZSTD, Coding, Encoder, packed
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.coding.kernels import Bytes
from raystow.storage.format.manifest import Chunk
from raystow.workers.cuda.bases.copying import copy
from raystow.workers.cuda.bases.loads import Former, load, pieces, room
from raystow.workers.cuda.nvcomp import ALIGN


def former(name: str, raw: Bytes, coding: Coding, stored: Bytes) -> Former:
    n = (raw.size // dtype(name).itemsize,)
    row = Chunk("t", "[]", "tensor", name, n, (0,), n, 0, "weights", 0, 0, coding, raw_digest(raw), stored_digest(stored))
    return Former(row, [stored])


def numbers(name: str, elements: int, seed: int, *, positive: bool) -> Bytes:
    """Normal ones: their exponents are worth coding; and without a sign also the lowest planes."""
    made = np.random.default_rng(seed).normal(size=elements).astype("f8" if name == "float64" else "f4")
    of = dtype(name)
    words = (np.abs(made) if positive else made).view(f"u{made.itemsize}") >> (8 * (made.itemsize - of.width))
    return words.astype(f"u{of.width}").view(np.uint8)


def coded_on_cpu(name: str, raw: Bytes) -> Former:
    stored, coding = Encoder(raw.size).encode(raw, dtype(name))
    return former(name, raw, coding, stored)


def coded_on_gpu(name: str, raw: Bytes, stream: int = 1024) -> Former:
    """As an encoder does it: the highest plane in streams of Deflate."""
    of = dtype(name)
    planes = [np.empty(raw.size // of.width, np.uint8) for _ in range(of.width)]
    if of.width > 1:
        kernels.split(raw.view(kernels.WORDS[of.width]), of.rotate, tuple(planes))
    else:
        planes = [raw]
    streams = [deflated(planes[-1][i : i + stream].tobytes()) for i in range(0, planes[-1].size, stream)]
    sizes = tuple(map(len, streams))
    codecs = (*[RAW] * (of.width - 1), DEFLATE)
    coding = Coding(of.width > 1, of.rotate, codecs, (*[p.size for p in planes[:-1]], sum(sizes)), packed(sizes), stream)
    return former(name, raw, coding, np.frombuffer(b"".join([*map(bytes, planes[:-1]), *streams]), np.uint8))


def taken_apart(formers: list[Former]) -> list[list[Bytes]]:
    """Do what the tables say, in memory that is no larger than they may need; the planes of each chunk."""
    memory = np.zeros(sum(room(one.chunk) for one in formers) + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    made = load(formers, memory.ctypes.data + start)

    def at(address: int, nbytes: int) -> Bytes:
        first = address - memory.ctypes.data
        assert start <= first <= first + nbytes <= memory.size
        return memory[first : first + nbytes]

    copy(pieces(made.formers, memory.ctypes.data + start))
    for one, begin in made.formers:
        assert begin + one.chunk.coding.size <= made.nbytes
        one.check(memory[start + begin : start + begin + one.chunk.coding.size])
    for source, target, size in made.moves.tolist():
        assert size <= made.longest
        at(target, size)[:] = at(source, size)
    for (codec, _), table in made.streams.items():
        for source, size, target, space in table.T.tolist():
            assert source % ALIGN == target % ALIGN == 0, "nvCOMP wants it so"
            if codec == ZSTD:
                zstd.decode(at(source, size), (size,), space, at(target, space))
            else:
                at(target, space)[:] = np.frombuffer(zlib.decompress(at(source, size).tobytes(), -15), np.uint8)
    for source, target, groups in made.unpacks.tolist():
        assert groups <= made.largest
        kernels.unpack7(at(source, 7 * groups), at(target, 8 * groups))
    rows = zip(formers, made.planes.tolist(), strict=True)
    return [[at(address, row[1]) for address in row[2 : 2 + one.chunk.words.width]] for one, row in rows]


def words(former: Former, planes: list[Bytes]) -> Bytes:
    """The bytes of a chunk's elements, from its planes."""
    word = kernels.WORDS[former.chunk.words.width]
    made = np.empty(planes[0].size, word)
    if made.itemsize > 1:
        kernels.join(tuple(planes), former.chunk.coding.rotated, made)
    else:
        made[:] = planes[0]
    return made.view(np.uint8)
