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
from raystow.workers.cuda.loads import serves

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
    one.parts = [sound[:10], sound[10:].copy()]
    one.parts[1][7] ^= 1
    target = np.empty_like(sound)
    with pytest.raises(Damaged, match="do not match their digest") as caught:
        one.copy(target)
    assert caught.value.subject == "t"
    one.parts = [sound[:10], sound[10:]]
    one.copy(target)
    assert np.array_equal(target, sound)
    one.parts = [np.zeros_like(sound)]
    one.copy(target)
    assert not target.any(), "that the decoded bytes are wrong is found when they are read"
