"""Restores tensors on a GPU: stored bytes go up as they are, and are decoded, joined and checked there.

Threads fetch the bytes of a *lane* into pinned memory and check their digests: what reaches a decoder is what was written, since
nvCOMP may do anything on bytes that are not. Then the lane's kernels are enqueued, and the next lane is filled meanwhile. No raw
tensor is ever whole in host memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...storage import chunk as chunks
from ...storage import dtypes
from ...storage.digest import finish
from ...storage.errors import Damaged
from ...storage.manifest import Chunk
from ...storage.object_store import Buffer
from ...storage.reader import Piece, Reader, Request, Run, decode
from . import kernels, tables
from .digests import digests
from .nvcomp import ALIGN, Codec

_LANES, _FETCHING = 7, 5  # in all, and of these at most being filled: as many requests at a time as a reader has threads
_STORED = 48 << 20  # bytes of a lane's pinned memory, and of as much on the device
_ALIGNED = 60 << 20  # bytes on the device for coded streams, each at an address that nvCOMP takes
_PLANES = 96 << 20  # bytes of decoded planes on the device

Progress = Callable[[int], None]


@dataclass(frozen=True)
class _Derived:
    """A piece whose elements, the bytes ``raw``, follow from ``words`` (both uint8)."""

    run: Run
    piece: Piece
    words: torch.Tensor
    raw: torch.Tensor

    @property
    def address(self) -> int:
        """Where the elements go."""
        return int(self.raw.data_ptr())

    @property
    def dtype(self) -> dtypes.DType:
        """Of the elements."""
        return dtypes.dtype(self.piece.chunk.dtype)

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return self.piece.chunk.nbytes

    def derive(self) -> None:
        """Make them, on the current stream."""
        source, dtype = self.piece.chunk.words.name, self.piece.chunk.dtype
        if source == dtype:
            self.raw.copy_(self.words)
        else:
            self.raw.view(getattr(torch, dtype)).copy_(self.words.view(getattr(torch, source)))


@dataclass
class _Plan:
    """What a lane decodes: tables of addresses, in the units of ``kernels``."""

    runs: list[Run]
    starts: list[int]  # where each run lies in the lane's memory
    copies: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)  # what does not go straight to its place
    moves: list[np.ndarray[Any, Any]] = field(default_factory=list)  # int64 [3, streams]
    unpacks: list[tuple[int, int, int]] = field(default_factory=list)
    streams: dict[tuple[str, int], list[tuple[np.ndarray[Any, Any], ...]]] = field(default_factory=lambda: defaultdict(list))
    joins: dict[tuple[int, bool], list[tuple[int, list[int]]]] = field(default_factory=lambda: defaultdict(list))
    order: list[tuple[Run, Piece]] = field(default_factory=list)  # as the digests come
    derived: list[_Derived] = field(default_factory=list)
    planes: int = 0  # bytes taken of the lane's memory of that name
    aligned: int = 0


class _Lane:
    """Memory for some stored bytes on their way, and a stream to decode them on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.host = torch.empty(_STORED, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.host.numpy()
        self.stored = torch.empty(_STORED, dtype=torch.uint8, device=device)
        self.aligned = torch.empty(_ALIGNED, dtype=torch.uint8, device=device)
        self.planes = torch.empty(_PLANES, dtype=torch.uint8, device=device)
        self.plan: _Plan | None = None
        self.results: list[tuple[str, Any, Any]] = []
        self.done: Any = None


class Decoder:
    """Fills tensors of one GPU. Takes 1.4 GiB of device memory and 340 MiB of pinned memory until ``close``."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._lanes = [_Lane(device) for _ in range(_LANES)]
            self._codecs: dict[tuple[str, int], Codec] = {}

    def close(self) -> None:
        """Give the memory back."""
        torch.cuda.synchronize(self._device)
        self._lanes.clear()

    def fill(self, reader: Reader, requests: Sequence[Request], progress: Progress) -> None:
        """``Reader.fill`` for targets that are tensors of words on this device; what the current stream still does to them is
        waited for. What cannot be decoded here (chunks beyond a lane's size) is decoded in host memory, chunk by chunk."""
        fits, others = list[Run](), list[Run]()
        for run in reader.runs(requests):
            (fits if _fits(run) else others).append(run)
        ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.device(self._device), ThreadPoolExecutor(reader.threads, "raystow-read") as pool:
            try:
                fetching: deque[tuple[_Lane, list[Future[Buffer]]]] = deque()
                decoding: deque[_Lane] = deque(self._lanes)
                for plan in _batches(fits):
                    if len(fetching) == _FETCHING:
                        decoding.append(self._launch(*fetching.popleft()))
                    lane = decoding.popleft()
                    self._finish(lane, progress)
                    lane.plan = plan
                    lane.stream.wait_event(ready)
                    places = [
                        lane.bytes[start : start + run.length].data for run, start in zip(plan.runs, plan.starts, strict=True)
                    ]
                    fetching.append((lane, [pool.submit(reader.fetch, *what) for what in zip(plan.runs, places, strict=True)]))
                while fetching:
                    decoding.append(self._launch(*fetching.popleft()))
                for lane in decoding:
                    self._finish(lane, progress)
                for run in others:
                    _through_host(reader, run, progress)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                torch.cuda.synchronize(self._device)
                raise
            finally:
                for lane in self._lanes:
                    lane.plan, lane.results = None, []

    def _launch(self, lane: _Lane, fetches: list[Future[Buffer]]) -> _Lane:
        """When a lane's bytes are there, enqueue everything that it has to do."""
        for fetch in fetches:
            fetch.result()
        plan = lane.plan
        assert plan is not None
        end = plan.starts[-1] + plan.runs[-1].length
        with torch.cuda.stream(lane.stream):
            lane.stored[:end].copy_(lane.host[:end], non_blocking=True)
            for run, start in zip(plan.runs, plan.starts, strict=True):
                for same in run.places:
                    with run.naming(same[0]):
                        self._place(lane, plan, run, same, lane.stored.data_ptr() + start + same[0].chunk.start - run.start)
            if plan.streams:
                self._decompress(lane, plan)
            if plan.unpacks:
                table = np.array(plan.unpacks, np.int64)
                kernels.unpack7(self._upload(table), int(table[:, 2].max()))
            for (width, rotated), rows in plan.joins.items():
                table = np.zeros((len(rows), tables.COLUMNS), np.int64)
                for row, (target, planes) in zip(table, rows, strict=True):
                    row[0], row[1] = target, planes[0]
                    row[2 : 1 + len(planes)] = planes[1:]
                sums = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
                kernels.join(
                    self._upload(table),
                    int(table[:, 1].max()) * width,
                    width=width,
                    rotate=rotated,
                    packed=tables.can_pack(table, width),
                    digests=sums,
                )
                lane.results.append(("digests", (width, rotated), _to_host(sums)))
            for one in plan.derived:
                one.derive()
            if plan.derived:
                lane.results.append(("derived", None, digests(plan.derived, self._device)))
            for piece, raw in plan.copies:
                _copy_part(piece, raw)
            lane.done = lane.stream.record_event()
        return lane

    def _place(self, lane: _Lane, plan: _Plan, run: Run, same: list[Piece], stored: int) -> None:
        """Note for each plane of a chunk where it lies, or will lie when it is decoded, and where its words go: to the first of
        these pieces, if they are its elements. The others, all of the same stored bytes, follow."""
        chunk = same[0].chunk
        own = chunk.words.name == chunk.dtype
        words = self._target(plan, same[0]) if own else torch.empty(chunk.decoded, dtype=torch.uint8, device=self._device)
        plan.derived += [_Derived(run, piece, words, self._target(plan, piece)) for piece in (same[1:] if own else same)]
        places = chunks.layout(chunk.coding, chunk.words, chunk.decoded, chunk.coding.size)
        width, address = len(places), words.data_ptr()
        n = chunk.decoded // width
        if not chunk.decoded:
            return
        planes = [0] * width
        for place in places:
            source = stored + place.start
            if place.codec == chunks.RAW:
                planes[place.number] = source
                continue
            planes[place.number] = target = lane.planes.data_ptr() + plan.planes
            plan.planes += -(-n // ALIGN) * ALIGN
            if place.codec == chunks.PACK7:
                plan.unpacks.append((source, target, n // 8))
            else:
                sizes = np.array(place.sizes, np.int64)
                room = -(-sizes // ALIGN) * ALIGN
                aligned = lane.aligned.data_ptr() + plan.aligned + np.cumsum(room) - room
                plan.aligned += int(room.sum())
                each = np.minimum(chunk.coding.stream, n - np.arange(len(sizes)) * chunk.coding.stream)
                plan.moves.append(np.stack((source + np.cumsum(sizes) - sizes, aligned, sizes)))
                targets = target + np.arange(len(sizes)) * chunk.coding.stream
                plan.streams[place.codec, chunk.coding.stream].append((aligned, sizes, targets, each))
        plan.joins[_joined(chunk)].append((address, [n, *planes]))
        plan.order.append((run, same[0]))

    def _target(self, plan: _Plan, piece: Piece) -> torch.Tensor:
        """Memory (uint8) for the elements of a piece's chunk: where they belong, or some from which a part is copied there."""
        if piece.direct and piece.target.is_contiguous():
            words: torch.Tensor = piece.target.reshape(-1).view(torch.uint8)
            return words
        raw = torch.empty(piece.chunk.nbytes, dtype=torch.uint8, device=self._device)
        plan.copies.append((piece, raw))
        return raw

    def _decompress(self, lane: _Lane, plan: _Plan) -> None:
        table = np.ascontiguousarray(np.concatenate(plan.moves, axis=1).T)
        kernels.move(self._upload(table), int(table[:, 2].max()))
        for key, parts in plan.streams.items():
            codec = self._codecs.setdefault(key, Codec(*key))
            columns = [np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(4)]
            sources, sizes, targets, rooms = self._upload(np.stack(columns))
            scratch = torch.empty(codec.decoding_scratch(len(sizes)), dtype=torch.uint8, device=self._device)
            results = torch.full((2, len(sizes)), -1, dtype=torch.int64, device=self._device)
            status = results[1].view(torch.int32)[: len(sizes)]
            codec.decompress(sources, sizes, targets, rooms, decoded=results[0], scratch=scratch, status=status)
            lane.results.append(("streams", columns[3], _to_host(results)))

    def _upload(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)

    def _finish(self, lane: _Lane, progress: Progress) -> None:
        """Wait for what a lane does, and look at what came out of it."""
        plan, lane.plan = lane.plan, None
        if plan is None:
            return
        lane.done.synchronize()
        results, lane.results = lane.results, []
        sound = True
        sums: dict[tuple[int, bool], Iterator[int]] = {}
        derived: list[int] = []
        for kind, what, got in results:
            if kind == "streams":
                decoded, status = got.numpy()[0], got.numpy()[1].view(np.int32)[: got.shape[1]]
                sound = sound and not status.any() and bool((decoded == what).all())
            elif kind == "derived":
                derived = got.tolist()
            else:
                sums[what] = iter(got.tolist())
        for run, piece in plan.order:
            total = next(sums[_joined(piece.chunk)])
            if piece.chunk.words.name == piece.chunk.dtype:  # else there are the digests of what follows from it
                _check(run, piece, total, progress)
        for one, total in zip(plan.derived, derived, strict=True):
            _check(one.run, one.piece, total, progress)
        if not sound:
            raise Damaged("nvCOMP did not decode every stream to its size", subject=plan.runs[0].key)


def _joined(chunk: Chunk) -> tuple[int, bool]:
    """Chunks of which this is the same are joined together."""
    return (chunk.words.width if chunk.coding.planes else 1), chunk.coding.rotated


def _check(run: Run, piece: Piece, total: int, progress: Progress) -> None:
    if finish(total, piece.chunk.nbytes) != piece.chunk.raw_digest:
        with run.naming(piece):
            raise Damaged("the decoded bytes do not match their digest")
    progress(piece.chunk.nbytes)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _batches(runs: list[Run]) -> Iterator[_Plan]:
    """Runs in numbers that fit a lane."""
    some, starts, stored, planes, aligned = list[Run](), list[int](), 0, 0, 0
    for run in runs:
        length, raw, spread = -(-run.length // ALIGN) * ALIGN, _raw(run), _aligned(run)
        if some and (stored + length > _STORED or planes + raw > _PLANES or aligned + spread > _ALIGNED):
            yield _Plan(some, starts)
            some, starts, stored, planes, aligned = [], [], 0, 0, 0
        some.append(run)
        starts.append(stored)
        stored += length
        planes += raw
        aligned += spread
    if some:
        yield _Plan(some, starts)


def _raw(run: Run) -> int:
    """Bytes of planes that decoding a run may take at most, each plane rounded up."""
    return sum(same[0].chunk.decoded + ALIGN * 8 for same in run.places)


def _aligned(run: Run) -> int:
    """Bytes that a run's streams may take at most, each beginning where nvCOMP wants it."""
    return run.length + ALIGN * sum(len(same[0].chunk.coding.streams) for same in run.places)


def _fits(run: Run) -> bool:
    """Whether a lane can take a run, and nvCOMP its streams."""
    return (
        run.length <= _STORED
        and _raw(run) <= _PLANES
        and _aligned(run) <= _ALIGNED
        and all(not piece.chunk.coding.streams or piece.chunk.coding.stream % ALIGN == 0 for piece in run.pieces)
    )


def _copy_part(piece: Piece, raw: torch.Tensor) -> None:
    """Copy what was asked for of a chunk's bytes."""
    target = piece.target
    if target.numel():
        rest = target.shape[len(piece.chunk.extent) :]  # complex128 is seen as pairs of words
        words = raw.view(target.dtype).reshape(*piece.chunk.extent, *rest)
        target.copy_(words[piece.source + (Ellipsis,)])


def _through_host(reader: Reader, run: Run, progress: Progress) -> None:
    data = np.frombuffer(reader.fetch(run), np.uint8)
    for piece in run.pieces:
        with run.naming(piece):
            _, raw = decode(piece.chunk, run.stored(piece, data))
        _copy_part(piece, torch.from_numpy(raw).to(piece.target.device))
        progress(piece.chunk.nbytes)
