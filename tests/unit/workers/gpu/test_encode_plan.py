"""The plan of an encoder depends on the positions of chunks, not on their content, and needs no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding import dtypes
from raystow.storage.coding.chunk import SMALL
from raystow.workers.gpu.encode.encode_plan import ROWS, Batch, Circle, EncodePlan, Limits, key
from raystow.workers.gpu.encode_request import DeviceSource

Interval = tuple[int, int]
NAMES = ("float8_e4m3fn", "uint8", "bfloat16", "int16", "float32", "int32", "complex64", "float64", "int64")
DTYPES = [dtypes.dtype(name) for name in NAMES]


@dataclass(frozen=True)
class Chunk(DeviceSource):
    """A source with a position only. The plan needs no other property."""

    name: str
    dtype: dtypes.DType
    nbytes: int
    address: int | None
    identity: int = 0
    high: tuple[int, ...] = ()

    @property
    def planes(self) -> tuple[int, ...]:
        return self.high or (self.dtype.width - 1,)

    describe = None


@dataclass(frozen=True)
class Case:
    sources: list[Chunk]
    limits: Limits
    low: Interval
    high: Interval
    plan: EncodePlan

    def lying(self, batches: Iterable[Batch], *, high: bool) -> list[Interval]:
        """Return the memory intervals of the planes of these batches: of the encoded planes if ``high``, otherwise of the
        other planes.
        """
        found = []
        for i in [i for batch in batches for i in range(batch.first, batch.last)]:
            job = self.plan.jobs[i]
            starts = self.plan.table[i, 2 : 2 + job.width].tolist()
            found += [(starts[p], starts[p] + job.plane) for p in (job.high if high else job.low)]
        return found


def case(sources: list[Chunk], limits: Limits, spare: int = 0) -> Case:
    """Return a case with the least memory for the low planes plus ``spare`` bytes, and with the memory of a real encoder for
    the high planes.
    """
    largest = max([limits.batch, *(source.nbytes for source in sources)])
    rounding = 8 * 16 * min(len(sources), ROWS) + 512
    low = torch.empty(largest + rounding + spare, dtype=torch.uint8)
    high = torch.empty(3 * limits.streams * limits.stream, dtype=torch.uint8)
    spans = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in (low, high)]
    return Case(sources, limits, *spans, EncodePlan(sources, limits, low_planes=low, high_planes=high))


@st.composite
def chunks(draw: st.DrawFn, most: int, of: Sequence[dtypes.DType] = DTYPES) -> Chunk:
    """Draw a chunk of at most ``most`` words."""
    dtype = draw(st.sampled_from(of))
    words = draw(st.one_of(st.integers(1, most), st.integers(1, min(most, SMALL)), st.just(most)))
    address = draw(st.one_of(st.none(), *[st.integers(1, 1 << 47)] * 3))
    name, low = draw(st.sampled_from(["w", "a.w", "a.b", "a.0", "1"])), draw(st.sets(st.integers(0, dtype.width - 1)))
    high = draw(st.sampled_from([(), tuple(sorted(low | {dtype.width - 1}))]))
    return Chunk(name, dtype, words * dtype.width, address, draw(st.integers()), high)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stream = draw(st.sampled_from([0, 512, 1024, 4096]))
    streams = draw(st.integers(1, 12)) if stream else 0
    some = st.one_of(st.integers(1, 1 << 16), st.just(1 << 20))
    limits = Limits(draw(some), draw(some), draw(some), streams, stream)
    few = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    found = draw(st.lists(chunks(streams * stream or 10_000, few), max_size=30))
    sources = [one if _streams(one, stream) <= streams else dataclasses.replace(one, high=()) for one in found]
    return case(sources, limits, draw(st.integers(0, 1 << 16)))


def _streams(chunk: Chunk, stream: int) -> int:
    return len(chunk.planes) * -(-chunk.nbytes // chunk.dtype.width // stream) if stream else 0


def apart(intervals: list[Interval]) -> bool:
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(intervals)))


def inside(intervals: list[Interval], start: int, end: int) -> bool:
    return all(start <= first <= last <= end for first, last in intervals)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_each_chunk_is_in_one_batch_of_its_kind(it: Case) -> None:
    """The batches are within their limits."""
    plan, limits = it.plan, it.limits
    assert sorted(job.index for job in plan.jobs) == list(range(len(it.sources)))
    for job, (address, words) in zip(plan.jobs, plan.table[:, :2].tolist(), strict=True):
        source = it.sources[job.index]
        assert (job.name, job.address, job.nbytes, job.dtype) == (source.name, source.address, source.nbytes, source.dtype)
        assert (address, words * job.width) == (source.address or 0, source.nbytes)
        assert job.coded == (limits.stream > 0 and source.nbytes >= SMALL)
        assert job.high == (source.planes if job.coded else ())
    edges = [0, *(batch.last for batch in plan.batches)]
    assert edges[-1] == len(plan.jobs)
    for first, batch in zip(edges, plan.batches, strict=False):
        jobs = plan.jobs[batch.first : batch.last]
        assert batch.first == first < batch.last <= first + ROWS
        assert {job.width for job in jobs} == {batch.width}
        assert {job.coded and job.dtype.rotate for job in jobs} == {batch.rotate}
        assert {job.address is None for job in jobs} == {batch.scattered}
        assert len({job.kind for job in jobs}) == 1
        assert batch.largest == max(job.nbytes for job in jobs)
        assert len(jobs) == 1 or sum(job.nbytes for job in jobs) <= limits.batch
        assert len(jobs) == 1 or not jobs[0].coded or sum(job.plane * len(job.high) for job in jobs) <= limits.plane
        assert sum(job.streams * len(job.high) for job in jobs) <= limits.streams


@settings(max_examples=300, deadline=None)
@given(cases())
def test_no_plane_overwrites_a_plane_in_use(it: Case) -> None:
    batches = it.plan.batches
    for number, batch in enumerate(batches):
        end = batch.base + batch.low + batch.middle
        assert inside([(batch.base, end)], *it.low)
        assert inside(it.lying([batch], high=False), batch.base, end)
        assert inside(it.lying([batch], high=True), *it.high)
        assert not (it.plan.starts[batch.first : batch.last] % 16).any(), "the kernels read several bytes at a time"
        assert 0 <= batch.after <= number
        assert 0 <= batch.after_group <= max(0, batch.group), "the batch would wait for its own group"
        waiting = [other for other in batches[:number] if other.group >= batch.after_group]
        assert apart(it.lying(batches[batch.after : number + 1], high=False))
        assert apart(it.lying([*waiting, batch], high=True))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_streams_of_groups_tile_all_encoded_planes(it: Case) -> None:
    plan, limits = it.plan, it.limits
    assert [i for group in plan.groups for i in range(group.first, group.last)] == [
        i for i, job in enumerate(plan.jobs) if job.coded
    ]
    begin = 0
    for number, group in enumerate(plan.groups):
        jobs, batches = plan.jobs[group.first : group.last], [b for b in plan.batches if b.group == number]
        assert (batches[0].first, batches[-1].last, len(batches)) == (group.first, group.last, group.batches)
        assert len(batches) == 1 or sum(job.nbytes for job in jobs) <= limits.group
        assert group.streams.start == begin
        planes = [job for job in jobs for _ in job.high]
        starts = [0, *itertools.accumulate(job.streams for job in planes)]
        begin += starts[-1]
        assert group.streams.stop == begin <= group.streams.start + limits.streams
        assert group.starts.tolist() == starts[:-1]
        assert group.planes.tolist() == [job.plane for job in planes]
        assert (group.nbytes, group.largest) == (sum(job.plane for job in planes), max(job.streams for job in planes))
        assert group.owners.tolist() == [
            *([start, job.plane] for start, job in zip(starts, planes, strict=False)),
            [starts[-1], 0],
        ]
        addresses, lengths = plan.cuts[:, group.streams].tolist()
        for (first, last), (start, end) in zip(itertools.pairwise(starts), it.lying(batches, high=True), strict=True):
            assert addresses[first:last] == list(range(start, end, limits.stream))
            assert [a + n for a, n in zip(addresses, lengths, strict=True)][first:last] == [*addresses[first + 1 : last], end]
            assert max(lengths[first:last]) <= limits.stream
    assert plan.cuts.shape == (2, begin)
    assert np.array_equal(plan.chunks.numpy(), plan.table)


def test_only_chunks_of_different_kinds_are_in_separate_batches() -> None:
    """Float8 numbers and bytes are of one kind, and so are complex numbers and floats of their parts."""
    ways = itertools.product(DTYPES, (None, 4096), ("a.w", "b.w", "a.v"), range(2))
    sources = [Chunk(name, dtype, SMALL * dtype.width, address) for dtype, address, name, _ in ways]
    plan = case(sources, Limits(1 << 20, 1 << 20, 1 << 20, 500, 512)).plan
    assert len(plan.batches) == (len(DTYPES) - 2) * 2 * 2
    assert [group.batches for group in plan.groups] == [len(plan.batches)]


@pytest.mark.parametrize(("name", "batches"), [("layers.{}", 1), ("{}", 1), ("layers.{}.weight", 1), ("weight{}", 9)])
def test_members_of_a_list_are_read_together(name: str, batches: int) -> None:
    sources = [Chunk(name.format(i), dtypes.dtype("float32"), 4 * SMALL, 16 * i + 16) for i in range(9)]
    assert len(case(sources, Limits(1 << 20, 1 << 20, 1 << 20, 64, 1024)).plan.batches) == batches


def test_a_batch_has_at_most_as_many_rows_as_the_table() -> None:
    tiny = [Chunk("w", DTYPES[0], 1, 4096 + i) for i in range(2 * ROWS + 1)]
    batches = case(tiny, Limits(1 << 20, 1 << 20, 1 << 20, 4, 512)).plan.batches
    assert [(batch.first, batch.last) for batch in batches] == [(0, ROWS), (ROWS, 2 * ROWS), (2 * ROWS, 2 * ROWS + 1)]


@settings(max_examples=300, deadline=None)
@given(base=st.integers(0, 1 << 40), size=st.integers(0, 12_000), wanted=st.lists(st.integers(0, 13_000), max_size=60))
def test_a_circle_never_returns_overlapping_memory_in_use(base: int, size: int, wanted: list[int]) -> None:
    circle, placed, before = Circle(base, size), list[Interval](), 0
    for nbytes in wanted:
        room = -(-nbytes // 512) * 512
        if room > size:
            with pytest.raises(ValueError, match="do not fit into"):
                circle.place(nbytes)
            continue
        start, free = circle.place(nbytes)
        placed.append((start, start + nbytes))
        assert inside(placed[-1:], base, base + size)
        assert (start - base) % 512 == 0
        assert before <= free < len(placed), "the region would wait for itself"
        assert apart([region for region in placed[free:] if region[0] < region[1]])
        assert free == 0 or sum(-(-(last - first) // 512) * 512 for first, last in placed) > size, "there was free memory"
        before = free


@settings(max_examples=100, deadline=None)
@given(st.lists(chunks(5000), min_size=1, max_size=8), st.data())
def test_a_plan_is_reused_for_the_same_chunks_only(sources: list[Chunk], data: st.DataObject) -> None:
    assert key(sources) == key([dataclasses.replace(source) for source in sources])
    i = data.draw(st.integers(0, len(sources) - 1))
    for field in ("address", "nbytes", "identity"):
        other = dataclasses.replace(sources[i], **{field: (getattr(sources[i], field) or 0) + 8})
        assert key([*sources[:i], other, *sources[i + 1 :]]) != key(sources)
    assert key(sources[:-1]) != key(sources)
