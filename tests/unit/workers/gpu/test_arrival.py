"""The messages about chunks that a GPU has coded locate exactly their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from helpers.host_encoder import HostEncoder, HostSource, deflated
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding import dtypes, kernels
from raystow.storage.coding.chunk import DEFLATE, PACK7, RAW, SMALL, decode
from raystow.storage.coding.digest import raw_digest
from raystow.workers.gpu.encode.encode_plan import Limits
from raystow.workers.gpu.encode.pinned_ring import PinnedRing
from raystow.workers.packing.attempt import coded_draft
from raystow.workers.protocol import messages
from raystow.workers.protocol.messages import CodedLayout, StageCoded
from raystow.workers.shm.coded_layout import Layout, parts
from raystow.workers.shm.ring import Ring

pytestmark = pytest.mark.usefixtures("host_copies")

DTYPES = ("float8_e5m2", "uint8", "bfloat16", "int16", "float32", "complex64", "float64")
SLOT = 4096
STREAM = 512
Codecs = tuple[str, ...]


def random_source(
    name: str,
    dtype: str,
    elements: int,
    *,
    codable: bool,
    positive: bool,
    scattered: bool = False,
    high: tuple[int, ...] = (),
) -> HostSource:
    """``codable``: its highest plane gets smaller. ``positive``: no word is negative. ``high``: the planes that are to be coded;
    none: the highest."""
    of, seed = dtypes.dtype(dtype), list(name.encode())
    words = np.random.default_rng(seed).integers(0, 256, elements * of.itemsize, np.uint8).view(kernels.WORDS[of.width])
    signs = np.zeros_like(words) if positive else words << (8 * of.width - 1)
    return HostSource(name, of, (words >> (5 if codable else 1) | signs).view(np.uint8), scattered, high=high)


def expected(source: HostSource, stream: int, *, packed: bool) -> Codecs:
    """Return the expected codecs: a plane that coding does not make smaller is stored raw."""
    if source.nbytes < SMALL or not stream:
        return (RAW,)
    width = source.dtype.width
    words = source.raw.view(kernels.WORDS[width])
    rotated = (words << 1) | (words >> (8 * width - 1)) if source.dtype.rotate else words
    codecs = [PACK7 if packed and not p else RAW for p in range(width)]
    for p in source.planes:
        plane = rotated.view(np.uint8)[p::width].tobytes()
        size = sum(len(deflated(plane[i : i + stream])) for i in range(0, len(plane), stream))
        codecs[p] = DEFLATE if size < len(plane) else RAW
    return tuple(codecs)


def round_trip(sources: Sequence[HostSource], *, pack_limit: int | None, stream: int = STREAM) -> set[Codecs]:
    """Check that each chunk is decoded once and unchanged from the slots; return the codecs of the chunks."""
    most = max((source.nbytes for source in sources), default=0)
    limits = Limits(16 << 10, 8 << 10, 24 << 10, max(32, -(-most // stream) + 8) if stream else 0, stream)
    slots = 2 + sum(source.nbytes + 8 * 16 for source in sources) // SLOT
    ring, free = Ring.create(slots * SLOT, SLOT), list(range(slots))
    pinned = PinnedRing(ring, take=free.pop, release=free.extend)
    encoder = HostEncoder(list(sources), limits, pinned, pack_limit=pack_limit)
    layout = messages.decode(messages.encode(encoder.plan.layout(0, sources)), CodedLayout)
    staged = messages.decode(messages.encode(StageCoded(0, tuple(encoder.messages()))), StageCoded)
    rows = [row for message in reversed(staged.arrived) for row in Layout(layout).chunks(message)]
    assert sorted(row.info.name for row in rows) == sorted(source.name for source in sources)
    named, codecs = {source.name: source for source in sources}, set[Codecs]()
    for row in rows:
        chunk, source = coded_draft(row, 0), named[row.info.name]
        stored = np.concatenate([ring.slot(slot)[at : at + size] for slot, at, size in row.parts])
        raw = np.empty(source.nbytes, np.uint8)
        decode(chunk.coding, source.dtype, stored, raw)
        assert raw.tobytes() == source.raw.tobytes()
        assert chunk.raw_digest == raw_digest(source.raw)
        assert chunk.coding.codecs == expected(source, stream, packed=chunk.name in encoder.packed)
        codecs.add(chunk.coding.codecs)
    pinned.close()
    ring.close()
    return codecs


@st.composite
def several(draw: st.DrawFn) -> list[HostSource]:
    def one(number: int) -> HostSource:
        elements = draw(st.one_of(st.integers(1, 64), st.integers(65, 4000), st.integers(9, 500).map(lambda n: 8 * n)))
        codable, positive, scattered = (draw(st.booleans()) for _ in range(3))
        name = f"{number}.{draw(st.sampled_from('ab'))}"
        dtype = draw(st.sampled_from(DTYPES))
        highest = dtypes.dtype(dtype).width - 1
        some = [(*range(highest + 1),), *(tuple(sorted({p, highest})) for p in (0, highest // 2))]
        high = draw(st.sampled_from([(), *some]))
        return random_source(name, dtype, elements, codable=codable, positive=positive, scattered=scattered, high=high)

    return [one(number) for number in range(draw(st.integers(0, 12)))]


@settings(max_examples=100, deadline=None)
@given(several())
def test_chunks_with_all_raw_planes_in_one_run_arrive(sources: list[HostSource]) -> None:
    codecs = round_trip(sources, pack_limit=None)
    assert not any(PACK7 in some for some in codecs)


@settings(max_examples=150, deadline=None)
@given(several(), st.sampled_from([0, 1000, 5000, 1 << 20]))
def test_chunks_with_packed_lowest_planes_arrive(sources: list[HostSource], pack_limit: int) -> None:
    round_trip(sources, pack_limit=pack_limit)


@settings(max_examples=30, deadline=None)
@given(several())
def test_chunks_arrive_without_a_codec(sources: list[HostSource]) -> None:
    assert round_trip(sources, pack_limit=None, stream=0) <= {(RAW,)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_plane_is_stored_by_its_smallest_codec(dtype: str) -> None:
    """All combinations for every dtype, and large chunks of several digest blocks and many streams."""
    of = dtypes.dtype(dtype)
    flavours = list(itertools.product((True, False), (True, False)))
    sizes = [1, 3, SMALL // of.itemsize, 1601, 4000, 40_000]
    sources = [
        random_source(f"{n}.{codable}.{positive}", dtype, n, codable=codable, positive=positive)
        for n, (codable, positive) in itertools.product(sizes, flavours)
    ]
    lowest = [RAW, PACK7] if of.rotate else [RAW]
    planes = [lowest, *[[RAW]] * (of.width - 2), [RAW, DEFLATE]] if of.width > 1 else [[RAW, DEFLATE]]
    assert round_trip(sources, pack_limit=1 << 20) == {(RAW,), *itertools.product(*planes)}


def test_parts_of_a_run_are_found_in_all_slots() -> None:
    spans = [(0, 7, 90, 10), (10, 2, 0, 100), (110, 5, 0, 30)]
    assert parts(spans, 0, 140) == [(7, 90, 10), (2, 0, 100), (5, 0, 30)]
    assert parts(spans, 9, 2) == [(7, 99, 1), (2, 0, 1)]
    assert parts(spans, 10, 100) == [(2, 0, 100)]
    assert parts(spans, 60, 51) == [(2, 50, 50), (5, 0, 1)]
    assert parts(spans, 110, 0) == []
