"""Reads the chunks of a version into the memory of tensors and arrays: host memory, GPUs, and other dtypes by conversion."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.kernels import Words
from ...storage.errors import StateError, Unsupported
from ...storage.format.boxes import overlap
from ...storage.format.manifest import Chunk
from ...storage.reader import PackReader, Request, Run
from ..save.shards import Shard, bits, pending
from ..save.state_tree import Elements, Path, State, replace, show
from .aliases import Target, distinct, stored
from .plan import Progress, silent

logger = logging.getLogger(__name__)


class Fill:
    """The targets of one restore. Add all of them, ask for ``runs``, then ``run``.

    Attributes:
        values: New values for leaves that are replaced in their container, by path.
    """

    def __init__(self, into: State, reader: PackReader) -> None:
        self._into, self._reader = into, reader
        self.values: dict[Path, object] = {}
        self._tensors = dict[Target, tuple[Shard, list[Chunk]]]()
        self._numbers = dict[Target, Elements]()
        self._requests: dict[int | None, list[Request]] = defaultdict(list)  # by CUDA device; None: host memory
        self._runs: dict[int | None, list[Run]] = {}
        self._converted: list[tuple[Shard, list[Chunk]]] = []

    def add(self, shard: Shard, chunks: list[Chunk]) -> None:
        """Fill this rank's part of a tensor from these chunks."""
        self._tensors[_target(shard, lambda: stored(chunks, (shard.offset, shard.extent)))] = shard, chunks

    def add_number(self, shard: Shard, number: Elements) -> None:
        """Fill a tensor without dimensions with one of the same dtype in host memory."""
        self._numbers[_target(shard, lambda: bits(number).tobytes())] = number

    def runs(self) -> Iterator[Run]:
        """The ranges of packs that are read. ``StateError`` if targets share memory, ``Damaged`` unless the chunks hold each
        element of the targets once."""
        filled = distinct([*self._tensors, *self._numbers])
        self._numbers = {target: self._numbers[target] for target in filled if target in self._numbers}
        for shard, chunks in (self._tensors[target] for target in filled if target in self._tensors):
            if shard.dtype != chunks[0].dtype or pending(shard.local):
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
        self._reader.complete(self._runs.get(None, []), progress)
        for device, runs in self._runs.items():
            if device is not None:
                fill_on_gpu(self._reader, device, self._requests[device], runs, progress)
        for shard, chunks in self._converted:
            _fill_and_convert(self._reader, shard, chunks, progress)
        for target, number in self._numbers.items():
            assign(target.local, number)
        replace(self._into, self.values)


def _target(shard: Shard, content: Callable[[], Hashable]) -> Target:
    return Target(show(shard.leaf.path, "into"), shard.local, content)


def fill_on_gpu(reader: PackReader, device: int, requests: list[Request], runs: list[Run], progress: Progress) -> None:
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
        decoder.fill(reader, runs, progress)
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


def _fill_and_convert(reader: PackReader, shard: Shard, chunks: list[Chunk], progress: Progress) -> None:
    """Fill a target whose memory does not have the bits that were saved, through host memory for one shard: it has another dtype,
    or is a conjugated or negated view."""
    raw = np.empty(shard.extent, f"V{dtypes.dtype(chunks[0].dtype).itemsize}")
    reader.fill([Request(shard.leaf.name, chunks, (shard.offset, shard.extent), raw)], progress)
    try:
        if raw.size:
            _convert(raw, chunks[0].dtype, shard.local)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        what = f"{chunks[0].dtype} is not converted to {shard.dtype}: {error}"
        raise StateError(what, subject=show(shard.leaf.path, "into")) from error


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
