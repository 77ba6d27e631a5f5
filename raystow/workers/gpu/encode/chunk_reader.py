"""Reads chunks in device memory: splits them into byte planes, computes their digests, and detects changes by the training."""

from __future__ import annotations

import itertools
from operator import attrgetter

import numpy as np
import torch

from .. import kernel_args
from ..encode_request import EncodeRequest, changed_too_early
from ..kernels import copy_kernels, word_kernels
from ..uploads import Uploads
from .batch_results import BatchResults
from .device_memory import EncoderStreams
from .encode_plan import Batch, EncodePlan
from .stages import ReadBatch

_LAUNCH = attrgetter("scattered", "on_host", "width", "packed")  # batches that are sampled by one launch


class ChunkReader:
    """Reads the chunks of one save.

    A sixteenth of every chunk, evenly spread, is hashed when the save begins and again when the chunk is read. If the two hashes
    differ, the tensor was changed too early. Chunks in host memory cross the link only once: ``state.write_check`` has samples.
    """

    def __init__(self, plan: EncodePlan, request: EncodeRequest, streams: EncoderStreams, uploads: Uploads) -> None:
        self._plan, self._request, self._streams, self._uploads = plan, request, streams, uploads
        self._device = plan.chunks.device
        for stream in (streams.read, streams.urgent):
            stream.wait_event(request.after)
        with torch.cuda.stream(streams.read):
            self._samples = self._take_samples()
            self.results = BatchResults(plan, request.pieces)
            sampled = streams.read.record_event()
        streams.urgent.wait_event(sampled)

    def read(self, number: int, batch: Batch, free: list[torch.cuda.Event]) -> ReadBatch:
        """Launch the kernel that splits a batch. ``free``: events after which the memory for its planes is free."""
        stream = self._streams.urgent if self._request.urgent() else self._streams.read
        for event in free:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            table, copies = self._plan.rows(batch.first, batch.last), list[torch.Tensor]()
            if batch.scattered:
                table, copies = self._gathered(batch.first, batch.last)
            word_kernels.split(
                table,
                batch.largest,
                width=batch.width,
                rotate=batch.rotate,
                packed=batch.packed,
                results=self.results.on_device(batch),
            )
            found = self.results.to_host(batch)
            return ReadBatch(number, batch, stream.record_event(), found, copies)

    def check(self, read: ReadBatch) -> None:
        """Raise ``SaveFailed`` if a chunk of a batch that has been read has changed since the save began."""
        first, last = read.batch.first, read.batch.last
        if read.batch.on_host:
            return
        changed = np.flatnonzero(read.found[1] != self._samples.numpy()[first:last])
        if len(changed):
            raise changed_too_early(self._plan.jobs[first + changed[0]].name)

    def _take_samples(self) -> torch.Tensor:
        """Hash a part of all chunks; return int64 [jobs] in host memory."""
        plan = self._plan
        samples = torch.zeros(len(plan.jobs), dtype=torch.int64, device=self._device)
        for (scattered, on_host, width, packed), alike in itertools.groupby(plan.batches, _LAUNCH):
            batches = list(alike)
            first, last = batches[0].first, batches[-1].last
            if on_host:
                continue
            if not scattered:
                table, largest = plan.rows(first, last), max(batch.largest for batch in batches)
                word_kernels.sample(table, largest, width=width, packed=packed, samples=samples[first:last])
                continue
            for i in range(first, last):  # one at a time, so that there is one copy at a time
                job = plan.jobs[i]
                table, copies = self._gathered(i, i + 1)
                word_kernels.sample(table, job.nbytes, width=job.width, packed=False, samples=samples[i : i + 1])
                del copies
        return copy_kernels.to_host(samples)

    def _gathered(self, first: int, last: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the kernels' table of scattered chunks, and their copies, which must live until the kernel is launched."""
        jobs = self._plan.jobs[first:last]
        pieces = [self._request.pieces[job.index] for job in jobs]
        if jobs[0].on_host:
            words = self._uploads.words(pieces)
            self._request.uploaded(pieces, words)
            copies = [piece.gather(uploaded) for piece, uploaded in zip(pieces, words, strict=True)]
        else:
            copies = [piece.gather() for piece in pieces]
        rows = self._plan.table[first:last].copy()
        rows[:, 0] = [copy.data_ptr() for copy in copies]
        return kernel_args.upload(rows, self._device), copies
