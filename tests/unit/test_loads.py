"""The tables by which chunks of an earlier version are taken apart on a GPU, followed by hand: they lead to their planes."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from host_encoder import deflated
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding import kernels, zstd
from raystow.storage.coding.chunk import DEFLATE, PACK7, RAW, ZSTD, Coding, Encoder, packed
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import Damaged
from raystow.storage.format.manifest import Chunk
from raystow.workers.cuda.loads import Former, load, room, serves
from raystow.workers.cuda.nvcomp import ALIGN

DTYPES = ("float8_e5m2", "bfloat16", "float32", "float64")
WANTED = st.tuples(st.sampled_from(DTYPES), st.integers(300, 90_000), st.booleans(), st.booleans())
"""Dtype, elements, whether none is negative, whether a CPU codes them."""


def former(name: str, raw: Bytes, coding: Coding, stored: Bytes) -> Former:
    n = (raw.size // dtype(name).itemsize,)
    row = Chunk("t", "[]", "tensor", name, n, (0,), n, 0, "weights", 0, 0, coding, raw_digest(raw), stored_digest(stored))
    return Former(row, stored)


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

    for one, begin in made.formers:
        assert begin + one.stored.size <= made.nbytes
        one.copy(memory[start + begin : start + begin + one.stored.size])
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


@settings(max_examples=60, deadline=None)
@given(st.lists(WANTED, min_size=1, max_size=4))
def test_tables_lead_to_the_planes_of_every_chunk(wanted: list[tuple[str, int, bool, bool]]) -> None:
    raws = [numbers(name, n // 8 * 8, i, positive=positive) for i, (name, n, positive, _) in enumerate(wanted)]
    code = [coded_on_cpu if on_cpu else coded_on_gpu for *_, on_cpu in wanted]
    formers = [of(name, raw) for of, (name, *_), raw in zip(code, wanted, raws, strict=True)]
    kept = [(one, raw) for one, raw in zip(formers, raws, strict=True) if serves(one.chunk)]
    for (one, raw), planes in zip(kept, taken_apart([one for one, _ in kept]), strict=True):
        word = kernels.WORDS[one.chunk.words.width]
        words = np.empty(raw.size // word().itemsize, word)
        if words.itemsize > 1:
            kernels.join(tuple(planes), one.chunk.coding.rotated, words)
        else:
            words[:] = planes[0]
        assert words.tobytes() == raw.tobytes()


def test_all_ways_of_coding_serve_but_those_that_are_not_in_planes() -> None:
    raw = numbers("float32", 40_000, 0, positive=True)
    packed, on_gpu = coded_on_cpu("float32", raw), coded_on_gpu("float32", raw)
    assert packed.chunk.coding.codecs[0] == PACK7
    assert all(serves(one.chunk) for one in (packed, on_gpu, coded_on_gpu("float8_e5m2", raw)))
    noise = np.random.default_rng(0).integers(0, 256, 80_000, np.uint8)
    assert not serves(coded_on_cpu("float32", noise).chunk), "bytes as they are"
    coding = on_gpu.chunk.coding
    for other in (replace(coding, base=3), replace(coding, rotated=False), replace(coding, stream=1000)):
        assert not serves(replace(on_gpu.chunk, coding=other))


def test_stored_bytes_are_held_against_their_digest_once() -> None:
    one = coded_on_cpu("float32", numbers("float32", 40_000, 0, positive=False))
    one.stored, sound = one.stored.copy(), one.stored
    one.stored[17] ^= 1
    target = np.empty_like(one.stored)
    with pytest.raises(Damaged, match="do not match their digest") as caught:
        one.copy(target)
    assert caught.value.subject == "t"
    one.stored = sound
    one.copy(target)
    assert np.array_equal(target, sound)
    one.stored = np.zeros_like(sound)
    one.copy(target)
    assert not target.any(), "that the decoded bytes are wrong is found when they are read"
