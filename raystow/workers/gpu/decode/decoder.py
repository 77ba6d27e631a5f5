"""Restores tensors on a GPU: stored bytes are copied to the device, and checked, decoded and joined there.

Work is divided into *lanes*, each with its own memory and CUDA stream. Threads fetch the stored bytes of a lane into pinned
memory. The bytes are copied to the device and hashed there: nvCOMP must get only bytes that were written, since its behaviour on
others is undefined. Then the lane's kernels are enqueued, while other lanes are filled. No decoded tensor is held in host memory.

The launching thread is the bottleneck: it shares the interpreter lock with the fetching threads, and releases it in every torch
operation. Therefore the tables of several lanes are computed together and copied to the device at once.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from ....storage.coding.chunk import DEFLATE
from ....storage.errors import Damaged
from ....storage.reader import PackReader, Piece, Run
from .. import kernel_args
from ..kernel_args import Addressed, Table
from ..kernels import blake3_kernels, copy_kernels, word_kernels
from ..kernels.deflate_kernels import Deflate
from ..nvcomp import STREAM, Codec
from ..pinned_memory import BUFFERS
from ..stream_layout import compute_tables
from .lane_plan import ROOM, Fetch, LaneMemory, LanePlan, Making, plan

logger = logging.getLogger(__name__)

_LANES, _FETCHING = 7, 4  # all lanes, and those that are filled at a time: more requests than a reader has threads
_TOGETHER = 8  # lanes whose tables are computed together

Progress = Callable[[int], None]
_Numbers = npt.NDArray[np.int64]
_NOTHING = np.empty(0, np.int64)
_OWN = DEFLATE, STREAM[DEFLATE]  # streams that raystow's coder writes and its decoder reads


class _Lane:
    """The memory and the stream of a lane: see ``lane_plan.LaneMemory``. Its kernels use ``scratch`` one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pinned = BUFFERS.take(ROOM.stored)
        self.bytes = self.pinned.memory
        self.host = torch.from_numpy(self.bytes)
        self.stored = torch.empty(ROOM.stored, dtype=torch.uint8, device=device)
        self.planes = torch.empty(ROOM.planes, dtype=torch.uint8, device=device)
        self.aligned = torch.empty(ROOM.aligned, dtype=torch.uint8, device=device)
        self.words = self.scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def allocate_words(self) -> None:
        """Allocate the memory for words, which most lanes never need."""
        if not self.words.numel():
            self.words = torch.empty(ROOM.words, dtype=torch.uint8, device=self.words.device)

    def allocate_scratch(self, nbytes: int) -> None:
        """Enlarge the scratch memory. The current stream must be the lane's, and must be idle."""
        if self.scratch.numel() < nbytes:
            self.scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.scratch.device)

    @property
    def memory(self) -> LaneMemory:
        """The address of each part."""
        return LaneMemory(*(part.data_ptr() for part in (self.stored, self.planes, self.aligned, self.words)))


@dataclass
class _Step:
    """Kernels that are launched together by ``launch(table, results, scratch)``, with ``size`` results and ``scratch`` bytes."""

    table: _Numbers
    size: int
    launch: Callable[[Addressed, Addressed, torch.Tensor], None]
    scratch: int = 0
    on_device: tuple[Addressed, Addressed] = field(init=False)  # table and results
    results: _Numbers = field(init=False)  # on the host


@dataclass
class _Work:
    """A plan that is executed in a lane. The first step hashes the stored bytes, and is executed before the others."""

    plan: LanePlan
    lane: _Lane
    fetches: list[Future[None]] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of results: of step 0, and of others
    tables: torch.Tensor = field(init=False)  # the device memory of all tables
    event: torch.cuda.Event = field(init=False)  # after the work that was enqueued last

    def places(self) -> Iterator[tuple[Fetch, memoryview]]:
        """Yield the fetches and their targets in host memory."""
        return ((fetch, self.lane.bytes[fetch.start : fetch.start + fetch.run.length].data) for fetch in self.plan.fetches)

    def decoded(self) -> Iterator[tuple[tuple[str, int], bool, bool]]:
        """Yield for each kind of streams whether a size is wrong, and whether a status is not 0, once the device has finished."""
        results = (step.results.reshape(2, -1) for step in self.steps[1:] if step.size)
        for (kind, streams), (sizes, status) in zip(self.plan.streams.items(), results, strict=False):
            expected = streams.table[4]
            yield kind, bool((sizes != expected).any()), bool(status.view(np.int32)[: len(expected)].any())

    def copy_up(self) -> None:
        """Enqueue the copy of all fetched bytes to the device."""
        last = self.plan.fetches[-1]
        end = last.start + last.run.length
        self.lane.pinned.wait(0)
        self.lane.stored[:end].copy_(self.lane.host[:end], non_blocking=True)

    def run(self, some: slice, *, copy: int) -> None:
        """Enqueue some of the steps, and the copy of their results to the host."""
        for step in self.steps[some]:
            step.launch(*step.on_device, self.lane.scratch)
        found, pinned = self.copies[copy]
        pinned.copy_(found, non_blocking=True)


class Decoder:
    """Fills tensors of one GPU. Allocates up to 1.2 GiB of device memory and 504 MiB of pinned memory until ``close``, and
    672 MiB of device memory more if only parts of chunks are requested. Pinned memory is kept for later: see ``BUFFERS``."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._lanes = list[_Lane]()
            self._codecs: dict[tuple[str, int], Codec] = {_OWN: Deflate()}

    def close(self) -> None:
        """Free the memory."""
        torch.cuda.synchronize(self._device)
        for lane in self._lanes:
            BUFFERS.give_back(lane.pinned)
        self._lanes.clear()

    def fill(self, reader: PackReader, runs: Sequence[Run], progress: Progress) -> None:
        """Do the work of ``PackReader.complete`` for targets that are tensors of words on this device.

        Earlier work of the current stream on the targets is waited for. Runs that do not fit into a lane are decoded on the CPU.
        """
        others = list[Run]()
        with torch.cuda.device(self._device), ThreadPoolExecutor(reader.threads, "raystow-read") as pool:
            try:
                planned = enumerate(map(_Work, plan(runs, others), self._in_turn()))
                works = dict(itertools.islice(planned, _FETCHING))
                for work in works.values():
                    _fetch(reader, pool, work)
                stages: dict[int, Callable[[_Work], None]] = {
                    0: _take_up,
                    -1: functools.partial(_launch, reader),
                    _FETCHING - _LANES: functools.partial(self._finish, progress),
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

    def _in_turn(self) -> Iterator[_Lane]:
        """Yield the lanes again and again. A lane is made when it is first needed."""
        while len(self._lanes) < _LANES:
            self._lanes.append(_Lane(self._device))
            yield self._lanes[-1]
        yield from itertools.cycle(self._lanes)

    def _prepare(self, works: Sequence[_Work]) -> None:
        """Compute the tables of some lanes."""
        for work in works:
            if work.plan.needs.words:
                work.lane.allocate_words()
            work.plan.lay_out(work.lane.memory)
        compute_tables([streams for work in works for streams in work.plan.streams.values()])
        self._upload(works)

    def _upload(self, works: Sequence[_Work]) -> None:
        """Make the steps of some lanes, and copy their tables to the device."""
        for work in works:
            work.steps = [_digesting(work.plan), *self._decoding(work.plan)]
        steps, device = [step for work in works for step in work.steps], self._device
        if not steps:
            return
        *starts, end = _offsets(step.table.size for step in steps)
        tables = torch.empty(end, dtype=torch.int64, pin_memory=True)
        numbers = tables.numpy()
        for step, start in zip(steps, starts, strict=True):
            numbers[start : start + step.table.size].reshape(step.table.shape)[...] = step.table
        *places, end = _offsets(step.size for step in steps)
        tables, results = tables.to(device, non_blocking=True), torch.zeros(end, dtype=torch.int64, device=device)
        found = torch.empty(end, dtype=torch.int64, pin_memory=True)
        first_table, first_result, numbers = tables.data_ptr(), results.data_ptr(), found.numpy()
        for step, start, place in zip(steps, starts, places, strict=True):
            table = Addressed(first_table + 8 * start, len(step.table), device)
            step.on_device = table, Addressed(first_result + 8 * place, step.size, device)
            step.results = numbers[place : place + step.size]
        sizes = [[_even(step.size) for step in work.steps] for work in works]
        parts = [part for first, *others in sizes for part in (first, sum(others))]
        copies = zip(results.split(parts), found.split(parts), strict=True)
        ready = torch.cuda.current_stream(device).record_event()
        for work in works:
            work.tables, work.copies = tables, list(itertools.islice(copies, 2))
            work.lane.stream.wait_event(ready)

    def _finish(self, progress: Progress, work: _Work) -> None:
        """Wait for a lane, and check its results."""
        work.event.synchronize()
        if _OWN in self._codecs and any(status for kind, _, status in work.decoded() if kind == _OWN):
            logger.info("streams of another Deflate coder are decoded by nvCOMP")
            self._codecs[_OWN] = Codec(*_OWN)
            self._upload([work])
            with torch.cuda.stream(work.lane.stream):
                work.lane.allocate_scratch(max(step.scratch for step in work.steps))
            _decode(work)
            work.event.synchronize()
        results = [step.results for step in work.steps[1:] if step.size]
        sums = results[len(work.plan.streams) :]
        progress(sum(work.plan.check(np.concatenate((_NOTHING, *sums)))))  # first, because its errors name a tensor
        if any(wrong or status for _, wrong, status in work.decoded()):
            raise Damaged("not every stream decodes to its size", subject=work.plan.fetches[0].run.key)

    def _decoding(self, plan: LanePlan) -> Iterator[_Step]:
        """Yield the steps that decode the stored bytes once they are verified."""
        for kind, streams in plan.streams.items():
            codec, source, n = self._codecs.get(kind) or self._codecs.setdefault(kind, Codec(*kind)), 0, streams.table.shape[1]
            if not isinstance(codec, Deflate):  # nvCOMP needs aligned streams
                source, moves = 1, streams.table[:3].T
                yield _Step(moves, 0, _plain(copy_kernels.move, int(moves[:, 2].max())))
            launch = functools.partial(_decompress, codec, n)
            yield _Step(streams.table[[source, 2, 3, 4]], 2 * n, launch, codec.decoding_scratch(n))
        if plan.unpacks:
            unpacks = np.array(plan.unpacks, np.int64)
            yield _Step(unpacks, 0, _plain(copy_kernels.unpack7, int(unpacks[:, 2].max())))
        for making, batch in plan.in_order:
            table = batch.table()
            largest, packed = int(table[:, 1].max()) * making.width, kernel_args.can_pack(table, making.width)
            yield _Step(table, len(table), functools.partial(_make, making, largest, packed))


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Return where each begins, in units of eight bytes, and at last where the last one ends."""
    return [0, *itertools.accumulate(map(_even, sizes))]


def _even(numbers: int) -> int:
    """Round up, so that every address is a multiple of 16: kernels are compiled again for others."""
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
    """``table``: int64 [4, ``n`` streams]; ``results``: their decoded sizes, then nvCOMP's status of each."""
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
    """Wait until a lane's bytes are in host memory, and enqueue their copy and their digests."""
    for fetch in work.fetches:
        fetch.result()
    with torch.cuda.stream(work.lane.stream):
        work.lane.allocate_scratch(max(step.scratch for step in work.steps))
        work.copy_up()
        work.run(slice(1), copy=0)
        work.event = work.lane.stream.record_event()


def _launch(reader: PackReader, work: _Work) -> None:
    """Wait for the digests, fetch bytes again that are wrong, and enqueue the decoding."""
    work.event.synchronize()
    with torch.cuda.stream(work.lane.stream):
        if not work.plan.as_written(work.steps[0].results):
            for fetch, place in work.places():
                with fetch.needed():
                    reader.fetch(fetch.run, place)  # they may have been corrupted in memory
            work.copy_up()
    _decode(work)


def _decode(work: _Work) -> None:
    """Enqueue all steps but the first."""
    with torch.cuda.stream(work.lane.stream):
        work.run(slice(1, None), copy=1)
        for piece, address in work.plan.copies:
            start = address - work.lane.memory.words
            _copy_part(piece, work.lane.words[start : start + piece.chunk.nbytes])
        work.event = work.lane.stream.record_event()


def _copy_part(piece: Piece, raw: torch.Tensor) -> None:
    """Copy the requested part of a chunk."""
    target = piece.target
    if target.numel():
        rest = target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        words = raw.view(target.dtype).reshape(*piece.chunk.extent, *rest)
        target.copy_(words[piece.source + (Ellipsis,)])


def _through_host(reader: PackReader, run: Run, progress: Progress) -> None:
    for piece, raw in reader.elements(run):
        _copy_part(piece, torch.from_numpy(raw).to(piece.target.device))
        progress(piece.chunk.nbytes)
