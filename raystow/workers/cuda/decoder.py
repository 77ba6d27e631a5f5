"""Restores tensors on a GPU: stored bytes go up as they are, and are decoded, joined and checked there.

Threads fetch the bytes of a *lane* into pinned memory. They go up, and their digests are taken: only what was written reaches a
decoder, since nvCOMP may do anything on bytes that were not. Then the lane's kernels are enqueued, while other lanes are filled.
No raw tensor is ever whole in host memory.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ...storage.coding import chunk as chunks
from ...storage.coding.digest import finish
from ...storage.errors import Damaged
from ...storage.object_store import Buffer
from ...storage.reader import Piece, Reader, Request, Run
from . import blake3, kernels, tables
from .lane_plan import ALIGNED, PLANES, STORED, LanePlan, Making, Streams, batches, fits, parts
from .nvcomp import ALIGN, Codec

_LANES, _FETCHING = 7, 4  # in all, and of these at most being filled: more requests at a time than a reader has threads

Progress = Callable[[int], None]


class _Lane:
    """Memory for some stored bytes on their way, and a stream to decode them on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.host = torch.empty(STORED, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.host.numpy()
        self.stored = torch.empty(STORED + blake3.PAST, dtype=torch.uint8, device=device)
        self.aligned = torch.empty(ALIGNED, dtype=torch.uint8, device=device)
        self.planes = torch.empty(PLANES, dtype=torch.uint8, device=device)
        self.plan: LanePlan | None = None
        self.digesting: Callable[[], torch.Tensor] = lambda: self.digests
        self.launches: list[Callable[[], None]] = []
        self.digests = torch.empty((0, 8), dtype=torch.int32)  # of the stored bytes, in pinned memory
        self.arrived: Any = None
        self.results = torch.empty(0, dtype=torch.int64)  # at first on the device, then in pinned memory
        self.done: Any = None

    def places(self) -> list[tuple[Run, memoryview]]:
        """What is to be fetched, and where it goes in host memory."""
        assert self.plan is not None
        whole = zip(self.plan.runs, self.plan.starts, strict=True)
        return [(run, self.bytes[start : start + run.length].data) for run, start in whole]

    def copy_up(self) -> None:
        """Enqueue the copy of all that was fetched."""
        assert self.plan is not None
        end = self.plan.starts[-1] + self.plan.runs[-1].length
        self.stored[:end].copy_(self.host[:end], non_blocking=True)

    def empty(self) -> None:
        """Forget what it was filled with."""
        self.plan, self.launches = None, []


class Decoder:
    """Fills tensors of one GPU. Takes 1.2 GiB of device memory and 504 MiB of pinned memory until ``close``."""

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
        """``Reader.fill`` for targets that are tensors of words on this device, and for no differences to other versions; what
        the current stream still does to them is waited for. Chunks beyond a lane's size are decoded in host memory, one by
        one."""
        decoded, others = list[Run](), list[Run]()
        for run in itertools.chain.from_iterable(map(parts, reader.runs(requests))):
            (decoded if fits(run) else others).append(run)
        ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.device(self._device), ThreadPoolExecutor(reader.threads, "raystow-read") as pool:
            try:
                fetching: deque[tuple[_Lane, list[Future[Buffer]]]] = deque()
                arriving: deque[_Lane] = deque()
                decoding: deque[_Lane] = deque(self._lanes)
                for plan in batches(decoded):
                    if len(fetching) == _FETCHING:
                        arriving.append(self._take_up(*fetching.popleft()))
                    if len(arriving) > 1:
                        decoding.append(self._launch(reader, arriving.popleft()))
                    lane = decoding.popleft()
                    self._finish(lane, progress)
                    lane.plan = plan
                    lane.stream.wait_event(ready)
                    fetching.append((lane, [pool.submit(reader.bring, *what) for what in lane.places()]))
                    self._prepare(lane, plan)
                arriving += [self._take_up(*one) for one in fetching]
                decoding += [self._launch(reader, lane) for lane in arriving]
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
                    lane.empty()

    def _prepare(self, lane: _Lane, plan: LanePlan) -> None:
        """Work out all that a lane has to do once its bytes are there, while they are fetched."""
        with torch.cuda.stream(lane.stream):
            for run, start in zip(plan.runs, plan.starts, strict=True):
                for same in run.places:
                    with run.naming(same[0]):
                        self._place(lane, plan, run, same, lane.stored.data_ptr() + start + same[0].chunk.start - run.start)
            lane.results = torch.zeros(plan.results, dtype=torch.int64, device=self._device)
            launches = list(self._launches(lane, plan, lane.results))
            sizes = [same[0].chunk.coding.size for _, same in plan.stored]
            ranges = blake3.table_of([address for address, _ in plan.stored], sizes)
            stored, *uploaded = self._upload([ranges, *(table for table, _ in launches)])
            lane.launches = [functools.partial(launch, table) for (_, launch), table in zip(launches, uploaded, strict=True)]
            lane.digesting = functools.partial(blake3.stored_digests, stored, sizes)

    def _take_up(self, lane: _Lane, fetches: list[Future[Buffer]]) -> _Lane:
        """When a lane's bytes are in host memory: copy them, and take their digests."""
        for fetch in fetches:
            fetch.result()
        with torch.cuda.stream(lane.stream):
            lane.copy_up()
            lane.digests = _to_host(lane.digesting())
            lane.arrived = lane.stream.record_event()
        return lane

    def _launch(self, reader: Reader, lane: _Lane) -> _Lane:
        """When they have arrived whole, enqueue everything that is to be done with them."""
        plan = lane.plan
        assert plan is not None
        lane.arrived.synchronize()
        with torch.cuda.stream(lane.stream):
            if not _as_written(plan, lane.digests):
                for run, place in lane.places():
                    reader.fetch(run, place)  # they may have been changed on their way
                lane.copy_up()
            for launch in lane.launches:
                launch()
            for piece, raw in plan.copies:
                _copy_part(piece, raw)
            lane.results = _to_host(lane.results)
            lane.done = lane.stream.record_event()
        return lane

    def _place(self, lane: _Lane, plan: LanePlan, run: Run, same: list[Piece], stored: int) -> None:
        """Note for each plane of a chunk where it lies, or will lie when it is decoded, and what is made of them: these pieces,
        all of the same stored bytes, whose elements are the words, or are derived from them."""
        chunk = same[0].chunk
        if not chunk.decoded:
            return
        places = chunks.layout(chunk.coding, chunk.words, chunk.decoded, chunk.coding.size)
        plan.stored.append((stored, same))
        width = len(places)
        n = chunk.decoded // width
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
                kind = place.codec, chunk.coding.stream
                streams = plan.streams.setdefault(kind, Streams(chunk.coding.stream))
                streams.planes.append((source, target, len(place.sizes), n))
                streams.sizes += place.sizes
        joined, words = plan.made[Making(width, chunk.coding.rotated)], 0
        for piece in same:
            if piece.chunk.dtype == chunk.words.name:
                words = self._target(plan, piece)
                joined.add([words, n, *planes], (run, piece))
                continue
            if not words:
                words = self._memory(plan, chunk.decoded).data_ptr()
                joined.add([words, n, *planes], None)
            row = [self._target(plan, piece), piece.chunk.nbytes // 2, words]
            plan.made[Making(2, rounded=piece.chunk.dtype)].add(row, (run, piece))

    def _target(self, plan: LanePlan, piece: Piece) -> int:
        """Where the elements of a piece's chunk go: where they belong, or to memory from which a part is copied there."""
        if not (piece.direct and piece.target.is_contiguous()):
            raw = self._memory(plan, piece.chunk.nbytes)
            plan.copies.append((piece, raw))
            return int(raw.data_ptr())
        return int(piece.target.data_ptr())

    def _memory(self, plan: LanePlan, nbytes: int) -> torch.Tensor:
        plan.held.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return plan.held[-1]

    def _launches(
        self, lane: _Lane, plan: LanePlan, results: torch.Tensor
    ) -> Iterator[tuple[np.ndarray[Any, Any], Callable[[torch.Tensor], None]]]:
        """All kernels of a lane, in order, each with the table that it wants on the device. ``results`` gets, as ``_finish``
        expects it: for each codec the decoded sizes of its streams, and what nvCOMP says of them; the digests of words."""
        aligned, end = lane.aligned.data_ptr(), 0
        for key, streams in plan.streams.items():
            table = streams.table(aligned)
            aligned = int(table[1, -1]) + -(-streams.sizes[-1] // ALIGN) * ALIGN
            yield np.ascontiguousarray(table[:3].T), functools.partial(kernels.move, largest=max(streams.sizes))
            begin, end = end, end + 2 * len(streams.sizes)
            yield table[1:], functools.partial(self._decompress, key, results[begin:end])
        if plan.unpacks:
            unpacks = np.array(plan.unpacks, np.int64)
            yield unpacks, functools.partial(kernels.unpack7, largest=int(unpacks[:, 2].max()))
        for making, batch in plan.in_order:
            table = np.zeros((len(batch.rows), tables.COLUMNS), np.int64)
            for row, numbers in zip(table, batch.rows, strict=True):
                row[: len(numbers)] = numbers
            begin, end = end, end + len(table)
            yield table, functools.partial(_make, making, table, results[begin:end])

    def _decompress(self, key: tuple[str, int], results: torch.Tensor, streams: torch.Tensor) -> None:
        codec = self._codecs.setdefault(key, Codec(*key))
        scratch = torch.empty(codec.decoding_scratch(streams.shape[1]), dtype=torch.uint8, device=self._device)
        decoded, said = results.view(2, -1)
        codec.decompress(*streams, decoded=decoded, scratch=scratch, status=said.view(torch.int32))

    def _upload(self, rows: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Tables of int64, all by one copy."""
        if not rows:
            return []
        flat = torch.from_numpy(np.concatenate([table.reshape(-1) for table in rows])).pin_memory()
        parts = flat.to(self._device, non_blocking=True).split([table.size for table in rows])
        return [part.view(table.shape) for part, table in zip(parts, rows, strict=True)]

    def _finish(self, lane: _Lane, progress: Progress) -> None:
        """Wait for what a lane does, and look at what came out of it."""
        plan = lane.plan
        if plan is None:
            return
        lane.done.synchronize()
        results, sound, end = lane.results.numpy(), True, 0
        lane.empty()
        for streams in plan.streams.values():
            begin, end = end, end + 2 * len(streams.sizes)
            decoded, said = results[begin:end].reshape(2, -1)
            sound = sound and not said.view(np.int32)[: len(decoded)].any() and bool((decoded == streams.rooms).all())
        for _, batch in plan.in_order:
            begin, end = end, end + len(batch.of)
            for of, total in zip(batch.of, results[begin:end].tolist(), strict=True):
                if of is not None:  # else there are the digests of what follows from it
                    _check(*of, total, progress)
        if not sound:
            raise Damaged("nvCOMP did not decode every stream to its size", subject=plan.runs[0].key)


def _make(making: Making, table: np.ndarray[Any, Any], digests: torch.Tensor, on_device: torch.Tensor) -> None:
    largest = int(table[:, 1].max()) * making.width
    if making.rounded:
        kernels.derive(on_device, largest, dtype=making.rounded, digests=digests)
    else:
        packed = tables.can_pack(table, making.width)
        kernels.join(on_device, largest, width=making.width, rotate=making.rotated, packed=packed, digests=digests)


def _as_written(plan: LanePlan, digests: torch.Tensor) -> bool:
    """Whether all stored bytes have the digests that the manifest says. ``digests``: int32 [ranges, 8]."""
    found = zip(plan.stored, digests.numpy(), strict=True)
    return all(digest.tobytes() == piece.chunk.stored_digest for (_, same), digest in found for piece in same)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _check(run: Run, piece: Piece, total: int, progress: Progress) -> None:
    if finish(total, piece.chunk.nbytes) != piece.chunk.raw_digest:
        with run.naming(piece):
            raise Damaged("the decoded bytes do not match their digest")
    progress(piece.chunk.nbytes)


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
