"""Reads the chunks of a version into the memory of tensors and arrays: host memory, GPUs, and other dtypes by conversion."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ...state.shards import Shard, bits, pending
from ...state.tree import Elements, Path, State, replace, show
from ...storage.coding import dtypes
from ...storage.coding.kernels import Words
from ...storage.errors import StateError, Unsupported
from ...storage.format.boxes import overlap
from ...storage.format.manifest import Chunk
from ...storage.runtime.spans import here, span
from ...storage.versions.reader import PackReader, Request
from ...storage.versions.runs import ByteRun
from .plan import Progress, silent
from .shared_containers import check_containers
from .targets import RestoreTarget, StoredElements, distinct

logger = logging.getLogger(__name__)

_AT_ONCE = 64 << 20  # bytes in host memory of tensors that are converted


class Fill:
    """The targets of one restore. Add all of them, ask for ``runs``, then ``run``. ``what``: the name of ``into`` in errors.

    Attributes:
        values: New values for leaves that are replaced in their container, by path.
    """

    def __init__(self, into: State, reader: PackReader, *, what: str = "into") -> None:
        self._into, self._reader, self._what = into, reader, what
        self.values: dict[Path, object] = {}
        self._tensors = dict[RestoreTarget, tuple[Shard, list[Chunk]]]()
        self._numbers = dict[RestoreTarget, Elements]()
        self._requests: dict[int | None, list[Request]] = defaultdict(list)  # by CUDA device; None: host memory
        self._runs: dict[int | None, list[ByteRun]] = {}
        self._converted: list[tuple[Shard, list[Chunk]]] = []

    def add(self, shard: Shard, chunks: list[Chunk]) -> None:
        """Fill this rank's part of a tensor from these chunks."""
        elements = StoredElements(shard.leaf.name, chunks, (shard.offset, shard.extent), self._reader)
        self._tensors[self._target(shard, lambda: elements)] = shard, chunks

    def add_number(self, shard: Shard, number: Elements) -> None:
        """Fill a tensor without dimensions with one of the same dtype in host memory."""
        self._numbers[self._target(shard, lambda: bits(number).tobytes())] = number

    def runs(self) -> Iterator[ByteRun]:
        """The ranges of packs that are read. ``StateError`` if targets share memory or values a place, ``Damaged`` unless
        the chunks hold each element of the targets once."""
        check_containers(self._into, self.values, self._what)
        filled = distinct([*self._tensors, *self._numbers])
        self._numbers = {target: self._numbers[target] for target in filled if target in self._numbers}
        for shard, chunks in (self._tensors[target] for target in filled if target in self._tensors):
            if shard.dtype != chunks[0].dtype or not _is_raw(shard.local):
                self._converted.append((shard, chunks))
            else:
                request = Request(shard.leaf.name, chunks, (shard.offset, shard.extent), shard.bits)
                self._requests[shard.device].append(request)
        self._runs = {device: self._reader.runs(requests) for device, requests in self._requests.items()}
        for runs in self._runs.values():
            yield from runs
        boxes = [((shard.offset, shard.extent), chunks) for shard, chunks in self._converted]
        yield from self._reader.whole(chunk for box, chunks in boxes for chunk in chunks if overlap(box, chunk.box) is not None)

    def run(self, progress: Progress = silent) -> None:
        """Read, check and decode. ``progress`` is called with the decoded bytes of each chunk."""
        self._reader.trace = here()
        self._reader.complete(self._runs.get(None, []), progress)
        for device, runs in self._runs.items():
            if device is not None:
                fill_on_gpu(self._reader, device, self._requests[device], runs, progress)
        for some in _batches(self._converted):
            self._fill_and_convert(some, progress)
        for target, number in self._numbers.items():
            assign(target.local, number)
        replace(self._into, self.values)

    def _target(self, shard: Shard, content: Callable[[], object]) -> RestoreTarget:
        return RestoreTarget(show(shard.leaf.path, self._what), shard.local, content)

    def _fill_and_convert(self, some: Sequence[tuple[Shard, list[Chunk]]], progress: Progress) -> None:
        """Fill targets through host memory whose own memory does not get the bits that were saved."""
        raws = [np.empty(shard.extent, f"V{dtypes.dtype(chunks[0].dtype).itemsize}") for shard, chunks in some]
        boxes = [(shard.leaf.name, chunks, (shard.offset, shard.extent)) for shard, chunks in some]
        self._reader.fill([Request(*box, raw) for box, raw in zip(boxes, raws, strict=True)], progress)
        for (shard, chunks), raw in zip(some, raws, strict=True):
            try:
                _convert(raw, chunks[0].dtype, shard.local)
            except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
                what = f"{chunks[0].dtype} is not converted to {shard.dtype}: {error}"
                raise StateError(what, subject=show(shard.leaf.path, self._what)) from error


def _is_raw(local: Elements) -> bool:
    """Whether decoders write to the memory of a target, and its values have the bits that are there."""
    return isinstance(local, np.ndarray) or (local.device.type in ("cpu", "cuda") and not pending(local))


def _batches(converted: Iterable[tuple[Shard, list[Chunk]]]) -> Iterator[list[tuple[Shard, list[Chunk]]]]:
    """Some shards at a time, which take ``_AT_ONCE`` bytes as they were saved, unless it is one shard."""
    batch, size = list[tuple[Shard, list[Chunk]]](), 0
    for shard, chunks in converted:
        more = math.prod(shard.extent) * dtypes.dtype(chunks[0].dtype).itemsize
        if batch and size + more > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append((shard, chunks))
        size += more
    if batch:
        yield batch


def fill_on_gpu(reader: PackReader, device: int, requests: list[Request], runs: list[ByteRun], progress: Progress) -> None:
    """Fill tensors of a GPU by decoding on it, or through host memory if nvCOMP is not installed or the GPU is too old. ``runs``:
    of the requests."""
    import torch

    try:
        from ...workers.gpu.decode.decoder import Decoder
        from ...workers.gpu.kernels.library import architecture
        from ...workers.gpu.nvcomp import version

        version()
        architecture(device)
    except (ImportError, Unsupported) as error:
        logger.warning("decoding on the CPU, at a tenth of the speed: %s", error)
        _fill_through_host(reader, requests, progress)
        return
    decoder = Decoder(torch.device("cuda", device))
    try:
        with span("restore.decode", reader.trace, device=device):
            decoder.fill(runs, reader.read, progress, threads=reader.threads)
    finally:
        decoder.close()


def _fill_through_host(reader: PackReader, requests: Iterable[Request], progress: Progress) -> None:
    import torch

    for request in requests:
        words = request.target
        raw = np.empty(request.box[1], f"V{dtypes.dtype(request.chunks[0].dtype).itemsize}")
        reader.fill([dataclasses.replace(request, target=raw)], progress)
        if raw.size:
            words.copy_(torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(words.dtype).reshape(words.shape))


def _convert(raw: Words, saved: str, target: Elements) -> None:
    """Copy numbers of the dtype ``saved`` by numpy's conversion into an array, by torch's into a tensor."""
    if isinstance(target, np.ndarray):
        if dtypes.of_numpy(dtypes.to_numpy(saved)) != saved:
            raise TypeError("numpy has no such dtype")
        assign(target, raw.view(dtypes.to_numpy(saved)))
        return
    import torch

    assign(target, torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, saved)).reshape(raw.shape))


def assign(target: Elements, numbers: Elements) -> None:
    """Copy numbers of the same kind, array or tensor, and of any dtype."""
    if isinstance(target, np.ndarray):
        np.copyto(target, numbers, casting="unsafe")
    else:
        target.detach().copy_(numbers)
