"""Restores tensors on a GPU: stored bytes are copied to the device, and checked, decoded and joined there.

Work is divided into *lanes*, each with its own memory and CUDA stream. Threads fetch the stored bytes of a lane into pinned
memory. The bytes are copied to the device and hashed there: nvCOMP must get only bytes that were written, since its behaviour on
others is undefined. Then the lane's kernels are enqueued, while other lanes are filled. No decoded tensor is held in host memory.

The launching thread is the bottleneck: it shares the interpreter lock with the fetching threads, which take it whenever it is
released. Every torch operation releases it, and every numpy operation on more than 500 numbers. Therefore copies and events are
calls of the driver (see ``lane``), and the streams of several lanes are laid out together.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from ....storage.coding.chunk import DEFLATE
from ....storage.errors import Damaged
from ....storage.versions.runs import ByteRun, Piece, ReadRun, changed_target
from .. import kernel_args
from ..kernel_args import Addressed, Table, part
from ..kernels import blake3_kernels, copy_kernels, word_kernels
from ..kernels.deflate_kernels import Deflate
from ..nvcomp import STREAM, Codec
from ..stream_layout import compute_tables
from .lane import Lane
from .lane_fetcher import THREADS, Arrivals, LaneFetcher
from .lane_plan import ROOM, Assembly, Fetch, LanePlan, plan

logger = logging.getLogger(__name__)

_LANES, _FETCHING = 7, 4  # all lanes, and those that are filled at a time: more runs than threads read
_TOGETHER = 8  # lanes that are laid out together

Progress = Callable[[int], None]
_Numbers = npt.NDArray[np.int64]
_NOTHING = np.empty(0, np.int64)
_OWN = DEFLATE, STREAM[DEFLATE]  # streams that raystow's coder writes and its decoder reads


@dataclass
class _Step:
    """Kernels that are launched together by ``launch(table, results, scratch)``, with a table of ``rows``, ``size`` results and
    ``scratch`` bytes."""

    table: bytes
    rows: int
    size: int
    launch: Callable[[Addressed, Addressed, torch.Tensor], None]
    scratch: int = 0
    on_device: tuple[Addressed, Addressed] = field(init=False)  # table and results
    place: slice = field(init=False)  # of the results among the lane's numbers
    results: _Numbers = field(init=False)  # on the host


@dataclass
class _Work:
    """A plan that is executed in a lane. The first step hashes the stored bytes, and is executed before the others."""

    plan: LanePlan
    lane: Lane
    arrivals: Arrivals = field(init=False)  # of the plan's fetches
    steps: list[_Step] = field(default_factory=list)

    def places(self) -> Iterator[tuple[Fetch, memoryview]]:
        """Yield the fetches and their targets in host memory."""
        return ((fetch, self.lane.bytes[fetch.start : fetch.start + fetch.run.length].data) for fetch in self.plan.fetches)

    def decoded(self) -> Iterator[tuple[tuple[str, int], bool, bool]]:
        """Yield for each kind of streams whether a size is wrong, and whether a status is not 0, once the device has finished."""
        results = (step.results.tobytes() for step in self.steps[1:] if step.size)
        for (kind, streams), found in zip(self.plan.streams.items(), results, strict=False):
            expected = streams.table[3].tobytes()  # comparisons of bytes keep the interpreter lock
            sizes, status = found[: len(expected)], found[len(expected) :][: len(expected) // 2]
            yield kind, sizes != expected, bool(status.strip(b"\0"))

    def copy_up(self) -> None:
        """Enqueue the copy of all fetched bytes to the device."""
        last = self.plan.fetches[-1]
        self.lane.send_stored(last.start + last.run.length)

    def run(self, some: slice) -> None:
        """Enqueue some of the steps, and the copy of their results to the host."""
        steps = self.steps[some]
        for step in steps:
            step.launch(*step.on_device, self.lane.scratch)
        if steps:
            self.lane.receive_numbers(steps[0].place.start, steps[-1].place.stop)


class Decoder:
    """Fills tensors of one GPU. Allocates up to 1.3 GiB of device memory and 504 MiB of pinned memory until ``close``, and
    672 MiB of device memory more if only parts of chunks are requested. Pinned memory is kept for later: see ``BUFFERS``.
    ``shared``: others may change the targets."""

    def __init__(self, device: torch.device, *, shared: bool = True) -> None:
        self._device, self._shared = device, shared
        self.lanes = list[Lane]()
        """Allocated until ``close``."""
        self._codecs: dict[tuple[str, int], Codec] = {_OWN: Deflate()}

    def close(self) -> None:
        """Free the memory."""
        torch.cuda.synchronize(self._device)
        for lane in self.lanes:
            lane.close()
        self.lanes.clear()

    def fill(self, runs: Sequence[ByteRun], read: ReadRun, progress: Progress, *, threads: int = THREADS) -> None:
        """Decode byte ranges into their targets, which are tensors of words on this device.

        Earlier work of the current stream on the targets is waited for. Runs that no lane can decode are decoded on the CPU.

        Args:
            read: Reads a run. ``threads`` threads call it.
            progress: Is called with the decoded bytes of chunks.

        Raises:
            Damaged: Bytes do not have their digests; the error names the tensor.
            StateError: A target was changed while it was filled.
        """
        others = list[ByteRun]()
        with torch.cuda.device(self._device), contextlib.closing(LaneFetcher(read, threads)) as fetcher:
            try:
                planned = enumerate(map(_Work, plan(runs, others), self._in_turn()))
                works = dict(itertools.islice(planned, _FETCHING))
                for work in works.values():
                    _fetch(fetcher, work)
                stages: dict[int, Callable[[_Work], None]] = {
                    0: self._take_up,
                    -1: functools.partial(_launch, read),
                    _FETCHING - _LANES: functools.partial(self._finish, read, progress),
                    _FETCHING: functools.partial(_fetch, fetcher),  # into the lane that has finished
                }
                for i in itertools.count():
                    if i % _TOGETHER == 0:
                        works.update(itertools.islice(planned, _TOGETHER))
                        _lay_out([works[j] for j in range(i, i + _TOGETHER) if j in works])
                    if not works:
                        break
                    for ahead, stage in stages.items():
                        if i + ahead in works:
                            stage(works[i + ahead])
                    works.pop(i + _FETCHING - _LANES, None)
                if others:
                    logger.warning("no lane of a GPU can take %d runs of stored bytes: they are decoded on the CPU", len(others))
                for run in others:
                    _through_host(read, run, progress)
            except BaseException:
                torch.cuda.synchronize(self._device)
                raise

    def _in_turn(self) -> Iterator[Lane]:
        """Yield the lanes again and again. A lane is made when it is first needed. Its stream waits for the current one."""
        for number in range(_LANES):
            if number == len(self.lanes):
                self.lanes.append(Lane(self._device))
            lane = self.lanes[number]
            lane.follow()
            yield lane
        yield from itertools.cycle(self.lanes)

    def _take_up(self, work: _Work) -> None:
        """Wait until a lane's bytes are in host memory, and enqueue their copy and their digests."""
        self._upload(work)
        for _ in work.plan.fetches:
            if error := work.arrivals.get():
                raise error
        with torch.cuda.stream(work.lane.stream):
            work.copy_up()
            work.run(slice(1))
            work.lane.record()

    def _upload(self, work: _Work) -> None:
        """Make the steps of a lane that is idle, and enqueue the copy of their tables, and of zeros for their results."""
        lane = work.lane
        work.steps = steps = [_digesting(work.plan), *self._decoding(work.plan)]
        *starts, end = _offsets([*(len(step.table) // 8 for step in steps), *(step.size for step in steps)])
        places = starts[len(steps) :]
        lane.reserve(scratch=max(step.scratch for step in steps), numbers=end)
        for step, start, place in zip(steps, starts, places, strict=False):
            lane.write(start, step.table)
            step.on_device = lane.placed(start, step.rows), lane.placed(place, step.size)
            step.place = slice(place, place + step.size)
            step.results = lane.numbers[step.place]
        lane.write(places[0], bytes(8 * (end - places[0])))
        with torch.cuda.stream(lane.stream):
            lane.send_numbers(end)

    def _finish(self, read: ReadRun, progress: Progress, work: _Work) -> None:
        """Wait for a lane, and check its results."""
        work.lane.wait()
        if any(status for kind, _, status in work.decoded() if kind == _OWN):
            logger.info("streams of another Deflate coder are decoded by nvCOMP")
            self._codecs[_OWN] = Codec(*_OWN)
            self._upload(work)
            _decode(work)
            work.lane.wait()
        results = [step.results for step in work.steps[1:] if step.size]
        sums = np.concatenate((_NOTHING, *results[len(work.plan.streams) :]))
        try:
            decoded = sum(work.plan.check(sums))  # first, because its errors name a tensor
        except Damaged:
            if not self._shared or any(wrong or status for _, wrong, status in work.decoded()):
                raise
            run, piece = work.plan.requested(sums)
            self._decode_apart(read, run)
            raise changed_target(piece) from None
        progress(decoded)
        if any(wrong or status for _, wrong, status in work.decoded()):
            raise Damaged("not every stream decodes to its size", subject=work.plan.fetches[0].run.key)

    def _decode_apart(self, read: ReadRun, run: ByteRun) -> None:
        """Decode a run into memory that nobody else can change. Raises ``Damaged`` if its stored bytes are wrong."""
        decoder = Decoder(self._device, shared=False)
        try:
            decoder.fill([replace(run, pieces=tuple(map(self._apart, run.pieces)))], read, lambda nbytes: None)
        finally:
            decoder.close()

    def _apart(self, piece: Piece) -> Piece:
        """The piece with its whole chunk and memory of its own as its target."""
        rest = piece.target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        own = torch.empty((*piece.chunk.extent, *rest), dtype=piece.target.dtype, device=self._device)
        return piece._replace(source=(), target=own, direct=True)

    def _decoding(self, plan: LanePlan) -> Iterator[_Step]:
        """Yield the steps that decode the stored bytes once they are verified."""
        for kind, streams in plan.streams.items():
            codec = self._codecs.get(kind) or self._codecs.setdefault(kind, Codec(*kind))
            table, n = streams.table[:4], streams.table.shape[1]
            if not isinstance(codec, Deflate):  # nvCOMP needs aligned streams
                table, moves = streams.table[[4, 1, 2, 3]], streams.table[[0, 4, 1]].T
                yield _Step(moves.tobytes(), n, 0, _plain(copy_kernels.move, int(moves[:, 2].max())))
            launch = functools.partial(_decompress, codec, n)
            rows = [row.tobytes() for row in table]  # each is contiguous, unlike the table
            yield _Step(b"".join(rows), len(rows), 2 * n, launch, codec.decoding_scratch(n))
        if plan.unpacks:
            unpacks = np.array(plan.unpacks, np.int64)
            yield _Step(unpacks.tobytes(), len(unpacks), 0, _plain(copy_kernels.unpack7, int(unpacks[:, 2].max())))
        for assembly, batch in plan.in_order:
            table = batch.table()
            largest, packed = int(table[:, 1].max()) * assembly.width, kernel_args.can_pack(table, assembly.width)
            yield _Step(table.tobytes(), len(table), len(table), functools.partial(_make, assembly, largest, packed))


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

    return _Step(table.tobytes(), len(sizes), 4 * len(sizes), launch, blake3_kernels.scratch_of(sizes))


def _plain(kernel: Callable[[Table, int], None], largest: int) -> Callable[[Addressed, Addressed, torch.Tensor], None]:
    return lambda table, results, scratch: kernel(table, largest)


def _decompress(codec: Codec, n: int, table: Addressed, results: Addressed, scratch: torch.Tensor) -> None:
    """``table``: int64 [4, ``n`` streams]; ``results``: their decoded sizes, then nvCOMP's status of each."""
    rows = [part(table, n * row, n) for row in range(len(table))]
    status = replace(part(results, n, n), dtype=torch.int32)
    codec.decompress(*rows, decoded=results, scratch=scratch, status=status)


def _make(assembly: Assembly, largest: int, packed: bool, table: Addressed, digests: Addressed, scratch: torch.Tensor) -> None:
    if assembly.rounded:
        word_kernels.derive(table, largest, dtype=assembly.rounded, digests=digests)
    elif assembly.added:
        word_kernels.add(table, largest, width=assembly.width, digests=digests)
    else:
        word_kernels.join(table, largest, width=assembly.width, rotate=assembly.rotated, packed=packed, digests=digests)


def _lay_out(works: Sequence[_Work]) -> None:
    """Compute the addresses of some lanes."""
    for work in works:
        if work.plan.needs.words:
            work.lane.reserve(words=ROOM.words)
        work.plan.lay_out(work.lane.memory)
    compute_tables([streams for work in works for streams in work.plan.streams.values()])


def _fetch(fetcher: LaneFetcher, work: _Work) -> None:
    work.arrivals = fetcher.fetch(work.places())


def _launch(read: ReadRun, work: _Work) -> None:
    """Wait for the digests, fetch bytes again that are wrong, and enqueue the decoding."""
    work.lane.wait()
    with torch.cuda.stream(work.lane.stream):
        if not work.plan.as_written(work.steps[0].results):
            for fetch, place in work.places():
                with fetch.needed():
                    fetch.run.fetch(read, place)  # they may have been corrupted in memory
            work.copy_up()
    _decode(work)


def _decode(work: _Work) -> None:
    """Enqueue all steps but the first."""
    with torch.cuda.stream(work.lane.stream):
        work.run(slice(1, None))
        for piece, address in work.plan.copies:
            start = address - work.lane.memory.words
            _copy_part(piece, work.lane.words[start : start + piece.chunk.nbytes])
        work.lane.record()


def _copy_part(piece: Piece, raw: torch.Tensor) -> None:
    """Copy the requested part of a chunk."""
    target = piece.target
    if target.numel():
        rest = target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        words = raw.view(target.dtype).reshape(*piece.chunk.extent, *rest)
        target.copy_(words[piece.source + (Ellipsis,)])


def _through_host(read: ReadRun, run: ByteRun, progress: Progress) -> None:
    for piece, raw in run.elements(read):
        _copy_part(piece, torch.from_numpy(raw).to(piece.target.device))
        progress(piece.chunk.nbytes)
