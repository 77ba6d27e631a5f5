"""Samples of chunks that lie on a GPU are judged as those in host memory are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding import chunk, delta, kernels
from raystow.storage.coding.dtypes import dtype
from raystow.workers.cuda.encoding.paying import pays


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["float8_e5m2", "bfloat16", "float32", "complex64", "float64"]),
    distances=st.lists(st.sampled_from([0, 1, 200, 2**14, 2**30, 2**62]), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_the_same_chunks_pay_and_the_same_planes_are_coded(name: str, distances: list[int], seed: int) -> None:
    of, random = dtype(name), np.random.default_rng(seed)
    word = np.dtype(f"u{of.width}")
    numbers = random.normal(size=(len(distances), 32_768)).astype("f4" if of.width < 8 else "f8")
    base = numbers.view(word)[:, -32_768:].copy() if of.width > 2 else (numbers.view("u4") >> (32 - 8 * of.width)).astype(word)
    far = [random.integers(0, distance, 32_768, np.uint64, endpoint=True).astype(word) for distance in distances]
    words = base + np.stack(far)
    samples = [np.stack([chunk.sample(row) for row in rows]) for rows in (words, base)]
    now, before = (torch.from_numpy(one.view(np.int8 if of.width == 1 else f"i{of.width}")) for one in samples)
    if of.width == 1:
        now, before = now.view(torch.uint8), before.view(torch.uint8)
    paying, planes = pays(now, before, rotate=of.rotate)
    for i, row in enumerate(words):
        encoder = chunk.Encoder(row.nbytes)
        made = delta.encode(encoder, row.view(np.uint8), of, base[i].copy().view(np.uint8), 1)
        assert bool(paying[i]) is (made is not None)
        if made is not None:
            difference = np.empty_like(row)
            kernels.subtract(row, base[i], difference)
            codecs = encoder.encode(difference.view(np.uint8), replace(of, rotate=False))[1].codecs
            expected = [codec != chunk.RAW for codec in codecs] if len(codecs) > 1 or of.width == 1 else [False] * of.width
            assert planes[i].tolist() == expected


def test_a_difference_must_save_a_twentieth() -> None:
    base = torch.randint(-(2**31), 2**31, (2, 4096)).to(torch.int32)
    near = torch.stack([torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (4096,)) for bits in (30, 31)]).to(torch.int32)
    assert pays(base + near, base, rotate=False)[0].tolist() == [True, False]  # they save 2 bits of 32, and 1


def test_more_chunks_than_are_counted_at_once() -> None:
    random = torch.randint(-(2**31), 2**31, (200, 4096)).to(torch.int32)
    paying, planes = pays(random, random + (torch.arange(200) % 2).to(torch.int32).view(-1, 1) * random.flip(1), rotate=False)
    assert paying.tolist() == [True, False] * 100
    assert planes[::2].all()
    assert not planes[1::2].any()
