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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ....storage.errors import Damaged
from ....storage.reader import Piece, Reader, Run
from ....storage.uncollected import uncollected
from .. import kernels, tables
from ..nvcomp import Codec
from ..streams import work_out
from . import blake3
from .lane_plan import ROOM, Fetch, LanePlan, Making, Memory, plan

logger = logging.getLogger(__name__)

_LANES, _FETCHING = 7, 4  # in all, and of these at most being filled: more requests at a time than a reader has threads
_TOGETHER = 8  # lanes whose work is worked out at once

Progress = Callable[[int], None]
_Table = np.ndarray[Any, Any]


class _Lane:
    """Memory for some stored bytes on their way, and a stream to decode them on; see ``lane_plan.Memory``."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.host = torch.empty(ROOM.stored, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.host.numpy()
        self.stored = torch.empty(ROOM.stored + blake3.PAST, dtype=torch.uint8, device=device)
        self.planes = torch.empty(ROOM.planes, dtype=torch.uint8, device=device)
        self.aligned = torch.empty(ROOM.aligned, dtype=torch.uint8, device=device)
        self.words = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room(self) -> None:
        """For words, which most lanes never need."""
        if not self.words.numel():
            self.words = torch.empty(ROOM.words, dtype=torch.uint8, device=self.words.device)

    @property
    def memory(self) -> Memory:
        """Where everything begins."""
        return Memory(*(part.data_ptr() for part in (self.stored, self.planes, self.aligned, self.words)))


class _Step(NamedTuple):
    """Some kernels: what they want to know (int64), how many numbers (int64) come of them, and what enqueues them when there is
    room for both on the device."""

    table: _Table
    results: int
    launch: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class _Work:
    """What a lane does with the bytes of a plan: ``steps``, of which the first takes their digests. ``tables``, ``results``: of
    each step, on the device. ``told``: the results of the first step, and those of all others, with pinned memory for them."""

    plan: LanePlan
    lane: _Lane
    fetches: list[Future[None]] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    tables: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    told: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
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
            step.launch(table.view(step.table.shape), results)
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

    def fill(self, reader: Reader, runs: Sequence[Run], progress: Progress) -> None:
        """``Reader.complete`` for targets that are tensors of words on this device; what the current stream still does to them is
        waited for. What no lane can take is decoded in host memory, one run after the other."""
        others = list[Run]()
        with torch.cuda.device(self._device), ThreadPoolExecutor(reader.threads, "raystow-read") as pool:
            try:
                planned = map(_Work, plan(runs, others), itertools.cycle(self._lanes))
                works = list(itertools.islice(planned, _FETCHING))
                for work in works:
                    _fetch(reader, pool, work)
                stages: dict[int, Callable[[_Work], None]] = {
                    0: _take_up,
                    -1: functools.partial(_launch, reader),
                    _FETCHING - _LANES: functools.partial(_finish, progress),
                    _FETCHING: functools.partial(_fetch, reader, pool),  # into the lane that has finished
                }
                for i in itertools.count():
                    if i % _TOGETHER == 0:
                        with uncollected():
                            works += itertools.islice(planned, _TOGETHER)
                            self._prepare(works[i : i + _TOGETHER])
                    if i == len(works) + _LANES - _FETCHING:
                        break
                    for ahead, stage in stages.items():
                        if 0 <= i + ahead < len(works):
                            stage(works[i + ahead])
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
                work.lane.make_room()
            work.plan.lay_out(work.lane.memory)
        work_out([streams for work in works for streams in work.plan.streams.values()])
        for work in works:
            work.steps = [_digesting(work.plan), *self._decoding(work.plan)]
        steps = [step for work in works for step in work.steps]
        if not steps:
            return
        flat = torch.from_numpy(np.concatenate([step.table.reshape(-1) for step in steps])).pin_memory()
        tables = _dealt(flat.to(self._device, non_blocking=True), [[step.table.size for step in work.steps] for work in works])
        numbers = [[step.results for step in work.steps] for work in works]
        first_and_others = [[first, sum(others)] for first, *others in numbers]
        results = torch.zeros(sum(map(sum, numbers)), dtype=torch.int64, device=self._device)
        pinned = torch.empty(results.shape, dtype=torch.int64, pin_memory=True)
        told = map(zip, _dealt(results, first_and_others), _dealt(pinned, first_and_others))
        for work, *work_has in zip(works, tables, _dealt(results, numbers), told, strict=True):
            work.tables, work.results, work.told = map(list, work_has)
        ready = torch.cuda.current_stream(self._device).record_event()
        for work in works:
            work.lane.stream.wait_event(ready)

    def _decoding(self, plan: LanePlan) -> Iterator[_Step]:
        """What follows once the stored bytes are known to be what was written."""
        for kind, streams in plan.streams.items():
            moves, decodes = streams.table[:3].T, streams.table[1:]
            yield _Step(moves, 0, _plain(kernels.move, int(moves[:, 2].max())))
            yield _Step(decodes, 2 * len(moves), functools.partial(self._decompress, kind))
        if plan.unpacks:
            unpacks = np.array(plan.unpacks, np.int64)
            yield _Step(unpacks, 0, _plain(kernels.unpack7, int(unpacks[:, 2].max())))
        for making, batch in plan.in_order:
            table = batch.table()
            largest, packed = int(table[:, 1].max()) * making.width, tables.can_pack(table, making.width)
            yield _Step(table, len(table), functools.partial(_make, making, largest, packed))

    def _decompress(self, kind: tuple[str, int], streams: torch.Tensor, results: torch.Tensor) -> None:
        codec = self._codecs.get(kind) or self._codecs.setdefault(kind, Codec(*kind))
        scratch = torch.empty(codec.decoding_scratch(streams.shape[1]), dtype=torch.uint8, device=self._device)
        decoded, said = results.view(2, -1)
        codec.decompress(*streams, decoded=decoded, scratch=scratch, status=said.view(torch.int32))


def _digesting(plan: LanePlan) -> _Step:
    sizes = [place.size for _, place in plan.stored]
    table = blake3.table_of([address for address, _ in plan.stored], sizes)
    return _Step(table, 4 * len(sizes), lambda table, results: blake3.stored_digests(table, sizes, results.view(torch.int32)))


def _plain(kernel: Callable[[torch.Tensor, int], None], largest: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    return lambda table, results: kernel(table, largest)


def _make(making: Making, largest: int, packed: bool, table: torch.Tensor, digests: torch.Tensor) -> None:
    if making.rounded:
        kernels.derive(table, largest, dtype=making.rounded, digests=digests)
    elif making.added:
        kernels.add(table, largest, width=making.width, digests=digests)
    else:
        kernels.join(table, largest, width=making.width, rotate=making.rotated, packed=packed, digests=digests)


def _dealt(flat: torch.Tensor, sizes: list[list[int]]) -> list[list[torch.Tensor]]:
    """Parts of a tensor, in groups."""
    parts = iter(flat.split(list(itertools.chain.from_iterable(sizes))))
    return [list(itertools.islice(parts, len(of))) for of in sizes]


def _fetch(reader: Reader, pool: ThreadPoolExecutor, work: _Work) -> None:
    work.fetches = [pool.submit(_bring, reader, *what) for what in work.places()]


def _bring(reader: Reader, fetch: Fetch, into: memoryview) -> None:
    with fetch.needed():
        reader.bring(fetch.run, into)


def _take_up(work: _Work) -> None:
    """When a lane's bytes are in host memory: copy them, and take their digests."""
    for fetch in work.fetches:
        fetch.result()
    with torch.cuda.stream(work.lane.stream):
        work.copy_up()
        work.run(slice(1), told=0)
        work.event = work.lane.stream.record_event()


def _launch(reader: Reader, work: _Work) -> None:
    """When they have arrived whole, enqueue everything that is to be done with them."""
    work.event.synchronize()
    with torch.cuda.stream(work.lane.stream):
        if not work.plan.as_written(work.told[0][1].numpy()):
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
    plan, numbers = work.plan, work.told[1][1].numpy()
    rooms = [streams.table[4] for streams in plan.streams.values()]
    *decoded, sums = np.split(numbers, np.cumsum([2 * len(room) for room in rooms], dtype=np.int64))
    for nbytes in plan.check(sums):  # first: an error of these names a tensor
        progress(nbytes)
    for room, (sizes, said) in zip(rooms, (one.reshape(2, -1) for one in decoded), strict=True):
        if said.view(np.int32)[: len(room)].any() or (sizes != room).any():
            raise Damaged("nvCOMP did not decode every stream to its size", subject=plan.fetches[0].run.key)


def _copy_part(piece: Piece, raw: torch.Tensor) -> None:
    """Copy what was asked for of a chunk's bytes."""
    target = piece.target
    if target.numel():
        rest = target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        words = raw.view(target.dtype).reshape(*piece.chunk.extent, *rest)
        target.copy_(words[piece.source + (Ellipsis,)])


def _through_host(reader: Reader, run: Run, progress: Progress) -> None:
    for piece, raw in reader.elements(run):
        _copy_part(piece, torch.from_numpy(raw).to(piece.target.device))
        progress(piece.chunk.nbytes)
