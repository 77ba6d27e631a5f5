"""Restores tensors on a GPU: stored bytes go up as they are, and are decoded, joined and checked there.

Threads fetch the bytes of a *lane* into pinned memory. They go up, and their digests are taken: only what was written reaches a
decoder, since nvCOMP may do anything on bytes that were not. Then the lane's kernels are enqueued, while other lanes are filled.
No raw tensor is ever whole in host memory.

The thread that launches is what limits it: it shares the interpreter's lock with those that fetch, and lets go of it in every
operation of torch. So what some lanes will do is worked out at once, and goes up by one copy.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ....storage.errors import Damaged
from ....storage.reader import PackReader, Piece, Run
from .. import kernel_args
from ..kernel_args import Addressed, Table
from ..kernels import blake3_kernels, copy_kernels, word_kernels
from ..nvcomp import Codec
from ..stream_layout import work_out
from .lane_plan import ROOM, Fetch, LaneMemory, LanePlan, Making, plan

logger = logging.getLogger(__name__)

_LANES, _FETCHING = 7, 4  # in all, and of these at most being filled: more requests at a time than a reader has threads
_TOGETHER = 8  # lanes whose work is worked out at once

Progress = Callable[[int], None]
_Numbers = np.ndarray[Any, Any]
_NOTHING = np.empty(0, np.int64)


class _Lane:
    """Memory for stored bytes in transit, and a stream to decode them on; see ``lane_plan.LaneMemory``. ``scratch``: what its
    kernels need besides, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.host = torch.empty(ROOM.stored, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.host.numpy()
        self.stored = torch.empty(ROOM.stored + blake3_kernels.PAST, dtype=torch.uint8, device=device)
        self.planes = torch.empty(ROOM.planes, dtype=torch.uint8, device=device)
        self.aligned = torch.empty(ROOM.aligned, dtype=torch.uint8, device=device)
        self.words = self.scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room_for_words(self) -> None:
        """Which most lanes never need."""
        if not self.words.numel():
            self.words = torch.empty(ROOM.words, dtype=torch.uint8, device=self.words.device)

    def make_scratch(self, nbytes: int) -> None:
        """On its stream, when nothing is under way there that uses what there was."""
        if self.scratch.numel() < nbytes:
            self.scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.scratch.device)

    @property
    def memory(self) -> LaneMemory:
        """Where everything begins."""
        return LaneMemory(*(part.data_ptr() for part in (self.stored, self.planes, self.aligned, self.words)))


class _Step(NamedTuple):
    """Some kernels. ``table``: what they want to know (int64); ``results``: how many numbers (int64) come of them; ``launch``
    enqueues them when there is room for both on the device, and for ``scratch`` bytes."""

    table: _Numbers
    results: int
    launch: Callable[[Addressed, Addressed, torch.Tensor], None]
    scratch: int = 0


@dataclass
class _Work:
    """What a lane does with the bytes of a plan: ``steps``, of which the first takes their digests. Of each step ``tables`` and
    ``results`` on the device (``held`` is their memory), and ``found``: the results on the host, once they are ``told``, those of
    the first step and those of all others, from the device to pinned memory."""

    plan: LanePlan
    lane: _Lane
    fetches: list[Future[None]] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    tables: list[Addressed] = field(default_factory=list)
    results: list[Addressed] = field(default_factory=list)
    found: list[_Numbers] = field(default_factory=list)
    told: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    held: tuple[torch.Tensor, ...] = ()
    event: Any = None  # of what was enqueued last

    def places(self) -> Iterator[tuple[Fetch, memoryview]]:
        """What is to be fetched, and where it goes in host memory."""
        return ((fetch, self.lane.bytes[fetch.start : fetch.start + fetch.run.length].data) for fetch in self.plan.fetches)

    def copy_up(self) -> None:
        """Enqueue the copy of all that was fetched."""
        last = self.plan.fetches[-1]
        end = last.start + last.run.length
        self.lane.stored[:end].copy_(self.lane.host[:end], non_blocking=True)

    def run(self, some: slice, *, told: int) -> None:
        """Enqueue some of the steps, and the copy of what comes of them."""
        for step, table, results in zip(self.steps[some], self.tables[some], self.results[some], strict=True):
            step.launch(table, results, self.lane.scratch)
        found, pinned = self.told[told]
        pinned.copy_(found, non_blocking=True)


class Decoder:
    """Fills tensors of one GPU. Takes 1.2 GiB of device memory and 504 MiB of pinned memory until ``close``; for tensors of which
    only parts of chunks are wanted, up to 672 MiB of device memory more."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._lanes = [_Lane(device) for _ in range(_LANES)]
            self._codecs: dict[tuple[str, int], Codec] = {}

    def close(self) -> None:
        """Give the memory back."""
        torch.cuda.synchronize(self._device)
        self._lanes.clear()

    def fill(self, reader: PackReader, runs: Sequence[Run], progress: Progress) -> None:
        """``PackReader.complete`` for targets that are tensors of words on this device. What the current stream still does to
        them is waited for. What no lane can take is decoded in host memory, one run after the other."""
        others = list[Run]()
        with torch.cuda.device(self._device), ThreadPoolExecutor(reader.threads, "raystow-read") as pool:
            try:
                planned = enumerate(map(_Work, plan(runs, others), itertools.cycle(self._lanes)))
                works = dict(itertools.islice(planned, _FETCHING))
                for work in works.values():
                    _fetch(reader, pool, work)
                stages: dict[int, Callable[[_Work], None]] = {
                    0: _take_up,
                    -1: functools.partial(_launch, reader),
                    _FETCHING - _LANES: functools.partial(_finish, progress),
                    _FETCHING: functools.partial(_fetch, reader, pool),  # into the lane that has finished
                }
                for i in itertools.count():
                    if i % _TOGETHER == 0:
                        works.update(itertools.islice(planned, _TOGETHER))
                        self._prepare([works[j] for j in range(i, i + _TOGETHER) if j in works])
                    if not works:
                        break
                    for ahead, stage in stages.items():
                        if i + ahead in works:
                            stage(works[i + ahead])
                    works.pop(i + _FETCHING - _LANES, None)
                if others:
                    logger.warning("no lane of a GPU can take %d runs of stored bytes: they are decoded on the CPU", len(others))
                for run in others:
                    _through_host(reader, run, progress)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                torch.cuda.synchronize(self._device)
                raise

    def _prepare(self, works: Sequence[_Work]) -> None:
        """Work out all that lanes have to do once their bytes are there."""
        for work in works:
            if work.plan.needs.words:
                work.lane.make_room_for_words()
            work.plan.lay_out(work.lane.memory)
        work_out([streams for work in works for streams in work.plan.streams.values()])
        for work in works:
            work.steps = [_digesting(work.plan), *self._decoding(work.plan)]
        steps = [step for work in works for step in work.steps]
        if not steps:
            return
        *tables, end = _one_behind_the_other(step.table.size for step in steps)
        flat = torch.empty(end, dtype=torch.int64, pin_memory=True)
        numbers = flat.numpy()
        for step, at in zip(steps, tables, strict=True):
            numbers[at : at + step.table.size].reshape(step.table.shape)[...] = step.table
        *results, end = _one_behind_the_other(step.results for step in steps)
        on_device = flat.to(self._device, non_blocking=True), torch.zeros(end, dtype=torch.int64, device=self._device)
        pinned = torch.empty(end, dtype=torch.int64, pin_memory=True)
        self._deal(works, tables, results, on_device, pinned)
        ready = torch.cuda.current_stream(self._device).record_event()
        for work in works:
            work.lane.stream.wait_event(ready)

    def _deal(
        self,
        works: Sequence[_Work],
        tables: Sequence[int],
        results: Sequence[int],
        held: tuple[torch.Tensor, torch.Tensor],
        pinned: torch.Tensor,
    ) -> None:
        """Tell each lane where the tables and the results of its steps begin in what all of them have together."""
        places, found = iter(zip(tables, results, strict=True)), pinned.numpy()
        first_table, first_result = (tensor.data_ptr() for tensor in held)
        for work in works:
            work.held = held
            for step, (table, result) in zip(work.steps, places, strict=False):
                work.tables.append(Addressed(first_table + 8 * table, len(step.table), self._device))
                work.results.append(Addressed(first_result + 8 * result, step.results, self._device))
                work.found.append(found[result : result + step.results])
        sizes = [[_even(step.results) for step in work.steps] for work in works]
        parts = [part for first, *others in sizes for part in (first, sum(others))]
        told = zip(held[1].split(parts), pinned.split(parts), strict=True)
        for work in works:
            work.told = list(itertools.islice(told, 2))

    def _decoding(self, plan: LanePlan) -> Iterator[_Step]:
        """What follows once the stored bytes are known to be what was written."""
        for kind, streams in plan.streams.items():
            moves, decodes = streams.table[:3].T, streams.table[1:]
            yield _Step(moves, 0, _plain(copy_kernels.move, int(moves[:, 2].max())))
            codec = self._codecs.get(kind) or self._codecs.setdefault(kind, Codec(*kind))
            launch = functools.partial(_decompress, codec, len(moves))
            yield _Step(decodes, 2 * len(moves), launch, codec.decoding_scratch(len(moves)))
        if plan.unpacks:
            unpacks = np.array(plan.unpacks, np.int64)
            yield _Step(unpacks, 0, _plain(copy_kernels.unpack7, int(unpacks[:, 2].max())))
        for making, batch in plan.in_order:
            table = batch.table()
            largest, packed = int(table[:, 1].max()) * making.width, kernel_args.can_pack(table, making.width)
            yield _Step(table, len(table), functools.partial(_make, making, largest, packed))


def _one_behind_the_other(sizes: Iterable[int]) -> list[int]:
    """Where each begins, counted in numbers; at last, where the last one ends."""
    return [0, *itertools.accumulate(map(_even, sizes))]


def _even(numbers: int) -> int:
    """So that every address is a multiple of 16: kernels are compiled anew for others."""
    return numbers + numbers % 2


def _digesting(plan: LanePlan) -> _Step:
    sizes = [place.size for _, place in plan.stored]
    table = blake3_kernels.table_of([address for address, _ in plan.stored], sizes)

    def launch(table: Addressed, digests: Addressed, scratch: torch.Tensor) -> None:
        blake3_kernels.stored_digests(table, sizes, replace(digests, dtype=torch.uint32), scratch)

    return _Step(table, 4 * len(sizes), launch, blake3_kernels.scratch_of(sizes))


def _plain(kernel: Callable[[Table, int], None], largest: int) -> Callable[[Addressed, Addressed, torch.Tensor], None]:
    return lambda table, results, scratch: kernel(table, largest)


def _decompress(codec: Codec, n: int, table: Addressed, results: Addressed, scratch: torch.Tensor) -> None:
    """``table``: four rows of numbers about ``n`` streams; ``results``: their decoded sizes, and what nvCOMP says of each."""
    rows = [Addressed(table.address + 8 * n * row, n, table.device) for row in range(len(table))]
    status = replace(results, address=results.address + 8 * n, dtype=torch.int32)
    codec.decompress(*rows, decoded=results, scratch=scratch, status=status)


def _make(making: Making, largest: int, packed: bool, table: Addressed, digests: Addressed, scratch: torch.Tensor) -> None:
    if making.rounded:
        word_kernels.derive(table, largest, dtype=making.rounded, digests=digests)
    elif making.added:
        word_kernels.add(table, largest, width=making.width, digests=digests)
    else:
        word_kernels.join(table, largest, width=making.width, rotate=making.rotated, packed=packed, digests=digests)


def _fetch(reader: PackReader, pool: ThreadPoolExecutor, work: _Work) -> None:
    work.fetches = [pool.submit(_bring, reader, *what) for what in work.places()]


def _bring(reader: PackReader, fetch: Fetch, into: memoryview) -> None:
    with fetch.needed():
        reader.bring(fetch.run, into)


def _take_up(work: _Work) -> None:
    """When a lane's bytes are in host memory: copy them, and take their digests."""
    for fetch in work.fetches:
        fetch.result()
    with torch.cuda.stream(work.lane.stream):
        work.lane.make_scratch(max(step.scratch for step in work.steps))
        work.copy_up()
        work.run(slice(1), told=0)
        work.event = work.lane.stream.record_event()


def _launch(reader: PackReader, work: _Work) -> None:
    """When they have arrived whole, enqueue everything that is to be done with them."""
    work.event.synchronize()
    with torch.cuda.stream(work.lane.stream):
        if not work.plan.as_written(work.found[0]):
            for fetch, place in work.places():
                with fetch.needed():
                    reader.fetch(fetch.run, place)  # they may have been changed on their way
            work.copy_up()
        work.run(slice(1, None), told=1)
        for piece, address in work.plan.copies:
            start = address - work.lane.memory.words
            _copy_part(piece, work.lane.words[start : start + piece.chunk.nbytes])
        work.event = work.lane.stream.record_event()


def _finish(progress: Progress, work: _Work) -> None:
    """Wait for what a lane does, and look at what came out of it."""
    work.event.synchronize()
    made = [found for step, found in zip(work.steps[1:], work.found[1:], strict=True) if step.results]
    decoded, sums = made[: len(work.plan.streams)], made[len(work.plan.streams) :]
    progress(sum(work.plan.check(np.concatenate((_NOTHING, *sums)))))  # first: an error of these names a tensor
    for streams, (sizes, said) in zip(work.plan.streams.values(), (one.reshape(2, -1) for one in decoded), strict=True):
        room = streams.table[4]
        if said.view(np.int32)[: len(room)].any() or (sizes != room).any():
            raise Damaged("nvCOMP did not decode every stream to its size", subject=work.plan.fetches[0].run.key)


def _copy_part(piece: Piece, raw: torch.Tensor) -> None:
    """Copy what was asked for of a chunk's bytes."""
    target = piece.target
    if target.numel():
        rest = target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        words = raw.view(target.dtype).reshape(*piece.chunk.extent, *rest)
        target.copy_(words[piece.source + (Ellipsis,)])


def _through_host(reader: PackReader, run: Run, progress: Progress) -> None:
    for piece, raw in reader.elements(run):
        _copy_part(piece, torch.from_numpy(raw).to(piece.target.device))
        progress(piece.chunk.nbytes)
