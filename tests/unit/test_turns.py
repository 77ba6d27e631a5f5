"""Programs of the same chunks, of which some are read in a later turn, and may then be differences or not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from host_encoder import HostSource
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.coding import dtypes
from raystow.workers.cuda.encoding.jobs import Aim
from raystow.workers.cuda.encoding.program import Limits, Program

LIMITS = Limits(batch=40_000, plane=20_000, group=60_000, streams=40, stream=1024, lane=30_000)
SIZES = [1, 500, 1024, 8192, 20_000]


@dataclass(frozen=True)
class Bench:
    """Chunks, what is aimed at, and memory for their planes."""

    sources: list[HostSource]
    aims: dict[int, Aim]
    kept: torch.Tensor = field(default_factory=lambda: torch.empty(100_000, dtype=torch.uint8))
    tops: torch.Tensor = field(default_factory=lambda: torch.empty(3 * 40 * 1024, dtype=torch.uint8))

    def program(self, aims: dict[int, Aim]) -> Program:
        return Program(self.sources, LIMITS, kept=self.kept, tops=self.tops, aims=aims)


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    sources, aims = list[HostSource](), dict[int, Aim]()
    for i in range(draw(st.integers(0, 30))):
        of = dtypes.dtype(draw(st.sampled_from(["bfloat16", "float32", "float64", "float8_e5m2"])))
        raw = np.zeros(of.itemsize * -(-draw(st.sampled_from(SIZES)) // of.itemsize), np.uint8)
        sources.append(HostSource(draw(st.sampled_from(["a.w", "b.w", "m"])), of, raw, draw(st.booleans())))
        turn = draw(st.integers(0, 4)) if raw.size >= 8192 and not sources[i].scattered else 0
        high = tuple(sorted(draw(st.sets(st.integers(0, of.width - 1), min_size=1))))
        aims[i] = Aim(turn, 5, high, raw.size + 100) if turn >= 2 and draw(st.booleans()) else Aim(turn)
    return Bench(sources, aims)


@settings(max_examples=150, deadline=None)
@given(benches(), st.integers(1, 4), st.booleans())
def test_programs_are_the_same_up_to_the_turn_in_which_they_part(bench: Bench, turn: int, decided: bool) -> None:
    """By turn 1 it is open which chunks are differences; by turn 2 whether they are, and by each later one whether more are."""
    if decided:
        aims = {i: aim if aim.turn < turn else Aim(aim.turn) for i, aim in bench.aims.items()}
    else:
        aims = {i: aim if aim.turn < turn else Aim(turn) for i, aim in bench.aims.items()}
    one, other = bench.program(aims), bench.program(bench.aims)
    first = one.begin_of(turn)
    assert first == other.begin_of(turn)
    assert one.batches[:first] == other.batches[:first]
    n = one.batches[first - 1].last if first else 0
    same = [replace(job, aim=other.jobs[i].aim) for i, job in enumerate(one.jobs[:n])]
    assert same == other.jobs[:n]
    assert np.array_equal(one.table[:n], other.table[:n])
    assert np.array_equal(one.starts[:n], other.starts[:n])
    groups = [[group for group in program.groups if group.first < n] for program in (one, other)]
    assert [(group.first, group.last, group.streams) for group in groups[0]] == [
        (group.first, group.last, group.streams) for group in groups[1]
    ]
    assert all(group.last <= n for group in groups[0]), "none goes on beyond"
    end = groups[0][-1].streams.stop if groups[0] else 0
    assert np.array_equal(one.cuts[:, :end], other.cuts[:, :end])


@settings(max_examples=150, deadline=None)
@given(benches())
def test_differences_are_read_by_themselves_as_many_as_a_lane_brings(bench: Bench) -> None:
    program = bench.program(bench.aims)
    assert sorted(job.index for job in program.jobs) == list(range(len(bench.sources)))
    for batch in program.batches:
        jobs = program.jobs[batch.first : batch.last]
        assert {(job.aim.turn, job.aim.base > 0) for job in jobs} == {(batch.turn, batch.differs)}
        assert len(jobs) == 1 or sum(job.aim.room for job in jobs) <= LIMITS.lane
        if batch.differs:
            assert not batch.packed
            assert all(job.high == bench.aims[job.index].high for job in jobs)
    turns = [batch.turn for batch in program.batches]
    assert turns == sorted(turns)
    said = program.layout(bench.sources)
    bases = np.frombuffer(said["numbers"], "<i8").reshape(5, -1)[4]
    assert bases.tolist() == [job.aim.base for job in program.jobs]
    assert [len(list(some)) for _, some in itertools.groupby(turns)] == [turns.count(turn) for turn in sorted(set(turns))]
