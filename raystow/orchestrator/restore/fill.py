"""Reads the chunks of a version into the memory of tensors and arrays: host memory, GPUs, and other dtypes by conversion."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.kernels import Words
from ...storage.errors import StateError, Unsupported
from ...storage.format.boxes import overlap
from ...storage.format.manifest import Chunk
from ...storage.reader import PackReader, Request, Run
from ..save.shards import Shard
from ..save.state_tree import Elements, Path, State, replace, show
from .plan import Progress, silent

logger = logging.getLogger(__name__)


class Fill:
    """The targets of one restore. ``add`` all of them, ask for ``runs``, then ``run``.

    Attributes:
        values: New values for leaves that are replaced in their container, by path.
    """

    def __init__(self, into: State, reader: PackReader) -> None:
        self._into, self._reader = into, reader
        self.values: dict[Path, object] = {}
        self._requests: dict[int | None, list[Request]] = defaultdict(list)  # by CUDA device; None: host memory
        self._runs: dict[int | None, list[Run]] = {}
        self._casts: list[tuple[Shard, list[Chunk]]] = []

    def add(self, shard: Shard, chunks: list[Chunk]) -> None:
        """Fill this rank's part of a tensor from these chunks."""
        if shard.dtype != chunks[0].dtype:
            self._casts.append((shard, chunks))
        else:
            request = Request(shard.leaf.name, chunks, (shard.offset, shard.extent), shard.bits)
            self._requests[shard.device].append(request)

    def runs(self) -> Iterator[Run]:
        """The ranges of packs that are read. ``Damaged`` unless the chunks hold each element of the targets once."""
        self._runs = {device: self._reader.runs(requests) for device, requests in self._requests.items()}
        for runs in self._runs.values():
            yield from runs
        boxes = [((shard.offset, shard.extent), chunks) for shard, chunks in self._casts]
        yield from self._reader.whole(chunk for box, chunks in boxes for chunk in chunks if overlap(box, chunk.box) is not None)

    def run(self, progress: Progress = silent) -> None:
        """Read, check and decode. ``progress`` is called with the decoded bytes of each chunk."""
        self._reader.complete(self._runs.get(None, []), progress)
        for device, runs in self._runs.items():
            if device is not None:
                fill_on_gpu(self._reader, device, self._requests[device], runs, progress)
        for shard, chunks in self._casts:
            _fill_and_cast(self._reader, shard, chunks, progress)
        replace(self._into, self.values)


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


def _fill_and_cast(reader: PackReader, shard: Shard, chunks: list[Chunk], progress: Progress) -> None:
    """Fill a target of another dtype than was saved, through host memory for one shard."""
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
        np.copyto(target, raw.view(dtypes.to_numpy(saved)), casting="unsafe")
        return
    import torch

    numbers = torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, saved)).reshape(raw.shape)
    target.detach().copy_(numbers)
