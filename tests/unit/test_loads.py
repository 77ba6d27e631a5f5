"""The tables by which chunks of an earlier version are taken apart on a GPU, followed by hand: they lead to their planes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from formers import coded_on_cpu, coded_on_gpu, numbers, taken_apart, words
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding.chunk import PACK7
from raystow.storage.errors import Damaged
from raystow.workers.cuda.bases.copying import copy
from raystow.workers.cuda.bases.loads import evenly, pieces, serves

DTYPES = ("float8_e5m2", "bfloat16", "float32", "float64")
WANTED = st.tuples(st.sampled_from(DTYPES), st.integers(300, 90_000), st.booleans(), st.booleans())
"""Dtype, elements, whether none is negative, whether a CPU codes them."""


@settings(max_examples=60, deadline=None)
@given(st.lists(WANTED, min_size=1, max_size=4))
def test_tables_lead_to_the_planes_of_every_chunk(wanted: list[tuple[str, int, bool, bool]]) -> None:
    raws = [numbers(name, n // 8 * 8, i, positive=positive) for i, (name, n, positive, _) in enumerate(wanted)]
    code = [coded_on_cpu if on_cpu else coded_on_gpu for *_, on_cpu in wanted]
    formers = [of(name, raw) for of, (name, *_), raw in zip(code, wanted, raws, strict=True)]
    kept = [(one, raw) for one, raw in zip(formers, raws, strict=True) if serves(one.chunk)]
    for (one, raw), planes in zip(kept, taken_apart([one for one, _ in kept]), strict=True):
        assert words(one, planes).tobytes() == raw.tobytes()


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
    (sound,) = one.parts
    wrong = sound.copy()
    wrong[17] ^= 1
    with pytest.raises(Damaged, match="do not match their digest") as caught:
        one.check(wrong)
    assert caught.value.subject == "t"
    one.check(sound)
    one.check(wrong)  # that the decoded bytes are wrong is found when they are read


def test_pieces_of_chunks_are_put_together_and_nothing_else_is_touched() -> None:
    chunks = [coded_on_cpu("bfloat16", numbers("bfloat16", 500 * i, i, positive=False)) for i in (1, 2, 3)]
    for one in chunks:
        (stored,) = one.parts
        one.parts = [stored[:7], stored[7:7], stored[7:]]
    places, memory = list(zip(chunks, (5, 4000, 10_000), strict=True)), np.full(20_000, 9, np.uint8)
    wanted = memory.copy()
    for one, start in places:
        wanted[start : start + one.chunk.coding.size] = np.concatenate(one.parts)
    copy(pieces(places, memory.ctypes.data))
    assert np.array_equal(memory, wanted)
    copy(pieces([], memory.ctypes.data))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=8), st.integers(1, 8))
def test_pieces_are_divided_evenly_and_copied_once(sizes: list[int], parts: int) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8), np.zeros(50_000, np.uint8)
    starts = np.cumsum([0, *sizes])[:-1] + 3 * np.arange(len(sizes))
    whole = np.array([(source.ctypes.data + a, target.ctypes.data + a, n) for a, n in zip(starts, sizes, strict=True)], np.int64)
    shares = list(evenly(whole.reshape(-1, 3), parts))
    counts = [int(share[:, 2].sum()) for share in shares]
    assert sum(counts) == sum(sizes)
    assert len(shares) == min(parts, sum(sizes))
    assert max(counts, default=0) - min(counts, default=0) <= 1
    for share in shares:
        copy(share)
    wanted = np.zeros_like(target)
    for a, n in zip(starts, sizes, strict=True):
        wanted[a : a + n] = source[a : a + n]
    assert np.array_equal(target, wanted)
