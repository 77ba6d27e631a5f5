"""The positions of the planes of a chunk: layouts from the encoder are accepted, and inconsistent layouts are damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from raystow.storage.coding.chunk import ANS, DEFLATE, PACK7, RAW, STREAMED, ZSTD, ChunkEncoder, Coding, decode, layout, packed
from raystow.storage.coding.dtypes import DTYPES, dtype
from raystow.storage.errors import Damaged, Unsupported

ENCODER = ChunkEncoder(1 << 20)
BF16 = dtype("bfloat16")

# A chunk of 800 bfloat16 words: two planes of 800 bytes, one raw and one encoded in streams of 300.
GOOD = Coding(True, True, (RAW, ZSTD), (800, 60), packed((10, 20, 30)), 300)
PACKED = Coding(True, True, (PACK7, ZSTD), (700, 60), packed((10, 20, 30)), 300)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(DTYPES)),
    words=st.integers(0, 20_000),
    spread=st.sampled_from([0, 1, 3, 40, 127, 255]),
    even=st.booleans(),
    seed=st.integers(0, 9),
)
def test_layouts_from_the_encoder_are_accepted(name: str, words: int, spread: int, even: bool, seed: int) -> None:
    kind = dtype(name)
    raw = np.random.default_rng(seed).integers(0, spread + 1, words * kind.itemsize, np.uint8)
    raw &= np.uint8(0xFE if even else 0xFF)
    coded, coding = ENCODER.encode(raw, kind)
    planes = layout(coding, kind, raw.size, coded.size)
    assert sorted(plane.number for plane in planes) == list(range(kind.width if coding.planes else 1))
    assert [plane.start for plane in planes] == np.cumsum([0, *(plane.size for plane in planes)])[:-1].tolist()
    assert sum(plane.size for plane in planes) == coded.size
    assert [plane.codec != RAW for plane in planes] == sorted(plane.codec != RAW for plane in planes), "raw planes come first"
    assert packed(size for plane in planes for size in plane.sizes) == coding.streams
    assert all(sum(plane.sizes) == plane.size for plane in planes if plane.codec in STREAMED)


@pytest.mark.parametrize("codec", [ZSTD, DEFLATE, ANS])
def test_all_streamed_codecs_have_the_same_layout(codec: str) -> None:
    low, top = layout(replace(GOOD, codecs=(codec, RAW), stored=(60, 800)), BF16, 1600, 860)
    assert (low.number, low.start, low.size) == (1, 0, 800)
    assert (top.number, top.start, top.size, top.sizes.tolist()) == (0, 800, 60, [10, 20, 30])


def test_an_empty_chunk_has_an_empty_plane() -> None:
    (plane,) = layout(Coding(False, False, (RAW,), (0,)), BF16, 0, 0)
    assert plane.size == 0


DAMAGES: dict[str, dict[str, Any]] = {
    "a codec too few": {"codecs": (RAW,)},
    "a codec too many": {"codecs": (RAW, ZSTD, RAW)},
    "a plane's size too few": {"stored": (860,)},
    "a plane's size too many": {"stored": (800, 60, 0)},
    "one plane where there are two": {"planes": False},
    "more bytes than the pack has": {"stored": (800, 61)},
    "less bytes than the pack has": {"stored": (800, 59)},
    "a raw plane too short": {"stored": (799, 61), "streams": packed((10, 20, 31))},
    "a raw plane too long": {"stored": (801, 59), "streams": packed((10, 20, 29))},
    "a negative size": {"stored": (-1, 861), "streams": packed((10, 20, 831))},
    "no streams": {"streams": b""},
    "a stream too few": {"streams": packed((10, 50))},
    "a stream too many": {"streams": packed((10, 20, 30, 1))},
    "streams that are too short together": {"streams": packed((10, 20, 29))},
    "streams that are too long together": {"streams": packed((10, 20, 31))},
    "an empty stream": {"streams": packed((0, 30, 30))},
    "a negative stream": {"streams": packed((-10, 40, 30))},
    "streams that decode to nothing": {"stream": 0},
    "streams that decode to less than nothing": {"stream": -300},
    "streams that decode to too much": {"stream": 400},
    "streams that decode to too little": {"stream": 266},
    "streams without a streamed plane": {"codecs": (RAW, RAW), "stored": (800, 800)},
    "streams of both planes for one": {"codecs": (ZSTD, ZSTD), "stored": (60, 800)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_inconsistent_layout_is_damage(damage: dict[str, Any]) -> None:
    assert layout(GOOD, BF16, 1600, 860)
    bad = replace(GOOD, **damage)
    stored = 1600 if damage.get("codecs") == (RAW, RAW) else 860
    with pytest.raises(Damaged):
        layout(bad, BF16, 1600, stored)


@pytest.mark.parametrize("nbytes", [0, 1598, 1599, 1601, 1602, 3200])
def test_a_chunk_of_another_size_is_damage(nbytes: int) -> None:
    with pytest.raises(Damaged):
        layout(GOOD, BF16, nbytes, 860)


@pytest.mark.parametrize("size", [0, 699, 701, 800])
def test_a_packed_plane_of_another_size_is_damage(size: int) -> None:
    assert layout(PACKED, BF16, 1600, 760)
    with pytest.raises(Damaged, match="packed"):
        layout(replace(PACKED, stored=(size, 60)), BF16, 1600, size + 60)


def test_a_packed_plane_with_a_partial_group_is_damage() -> None:
    with pytest.raises(Damaged, match="packed"):
        layout(replace(PACKED, stored=(697, 60)), BF16, 1594, 757)


def test_an_unknown_codec_raises_unsupported() -> None:
    with pytest.raises(Unsupported, match="brotli"):
        layout(replace(GOOD, codecs=(RAW, "brotli")), BF16, 1600, 860)


def test_a_gpu_codec_is_refused_on_a_cpu() -> None:
    with pytest.raises(Unsupported, match="GPU"):
        decode(replace(GOOD, codecs=(RAW, ANS)), BF16, np.zeros(860, np.uint8), np.zeros(1600, np.uint8))
