"""Measure each GPU coder alone on the parts of a training state: ratio, speed, and exact decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_workload import State
from torch import Tensor

CODERS = ("deflate", "zstd", "ans")
CHUNK = 16 << 20
SAMPLE = 512 << 20  # bytes of each part of the state
GROUP = {"zstd": 32 << 20}  # plane bytes per call, as in a save; others: 128 MiB
ROUNDS = 5
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pipeline:
    """One coder on chunks of one part of the state, with all tables prepared."""

    def __init__(self, words: Tensor, coder: str) -> None:
        """Prepare the tables for ``words``: integers of the part's width, [chunks, words in a chunk]."""
        from raystow.workers.gpu.kernels.deflate_kernels import coder as coder_of
        from raystow.workers.gpu.nvcomp import STREAM

        self._words, self._stream = words, STREAM[coder]
        self.chunks, self.words_each = words.shape
        self.width = words.element_size()
        device = words.device
        n = words.numel()
        self._codec = coder_of(coder)
        self._planes = torch.empty((self.width, n), dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(words)
        self._taking, self._joining = self._table(words), self._table(self._target)
        self._results = torch.zeros((3, self.chunks), dtype=torch.int64, device=device)
        starts = torch.arange(0, n, self._stream, device=device)
        self._sources = self._planes[-1].data_ptr() + starts
        self._sizes = (n - starts).clamp(max=self._stream)
        self._out = torch.empty(len(starts) * self._codec.stride, dtype=torch.uint8, device=device)
        self._targets = self._out.data_ptr() + torch.arange(len(starts), device=device) * self._codec.stride
        self._coded, self._decoded = torch.zeros_like(starts), torch.zeros_like(starts)
        self._status = torch.ones(len(starts), dtype=torch.int32, device=device)
        self._each = GROUP.get(coder, 128 << 20) // self._stream
        calls = min(self._each, len(starts))
        scratch = max(self._codec.coding_scratch(calls), self._codec.decoding_scratch(calls))
        self._scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
        self._packed = torch.empty(n // 8 * 7, dtype=torch.uint8, device=device)
        self._seven = torch.tensor([[self._planes[0].data_ptr(), self._packed.data_ptr(), n // 8]], device=device)
        self._back = self._seven[:, [1, 0, 2]].contiguous()
        self._even = False

    def _table(self, words: Tensor) -> Tensor:
        from raystow.workers.gpu.kernel_args import COLUMNS

        first = torch.arange(self.chunks) * self.words_each
        table = torch.zeros((self.chunks, COLUMNS), dtype=torch.int64)
        table[:, 0], table[:, 1] = words.data_ptr() + first * self.width, self.words_each
        for p in range(self.width):
            table[:, 2 + p] = self._planes[p].data_ptr() + first
        return table.to(words.device)

    def code(self) -> None:
        """Split all chunks, pack an even lowest plane, code the highest plane."""
        from raystow.workers.gpu.kernel_args import Addressed
        from raystow.workers.gpu.kernels import copy_kernels, word_kernels

        what = {"width": self.width, "rotate": True, "packed": self.width < 4}
        results = Addressed(self._results.data_ptr(), self._results.numel(), self._results.device)
        word_kernels.split(self._taking, self._bytes, **what, results=results)
        if self._even:
            copy_kernels.pack7(self._seven, self._packed.numel() // 7)
        for some in self._calls():
            self._codec.compress(
                self._sources[some],
                self._sizes[some],
                self._targets[some],
                self._coded[some],
                scratch=self._scratch,
                status=self._status[some],
            )

    def decode(self) -> None:
        """Decode into other words."""
        from raystow.workers.gpu.kernels import copy_kernels, word_kernels

        if self._even:
            copy_kernels.unpack7(self._back, self._packed.numel() // 7)
        for some in self._calls():
            self._codec.decompress(
                self._targets[some],
                self._coded[some],
                self._sources[some],
                self._sizes[some],
                decoded=self._decoded[some],
                scratch=self._scratch,
                status=self._status[some],
            )
        word_kernels.join(
            self._joining, self._bytes, width=self.width, rotate=True, packed=self.width < 4, digests=self._results[0]
        )

    def measure(self) -> dict[str, Any]:
        """Return ratio and speeds. Raises ``SystemExit`` if a bit differs."""
        self.code()
        self._even = self.words_each % 8 == 0 and not self._results[2].any().item()
        coding = [gpu_seconds(self.code) for _ in range(ROUNDS)]
        self._sound("code")
        stored = self._coded.sum().item() + (self.width - 1) * self._words.numel()
        stored -= self._words.numel() // 8 if self._even else 0
        self._planes[-1].zero_()
        if self._even:
            self._planes[0].zero_()
        self.decode()
        self._sound("decode")
        if not torch.equal(self._target, self._words):
            raise SystemExit(f"{self._codec.name} did not give back what it was given")
        decoding = [gpu_seconds(self.decode) for _ in range(ROUNDS)]
        gigabytes = self._words.numel() * self.width / 1e9
        return {
            "bytes": self._words.numel() * self.width,
            "ratio": stored / (self._words.numel() * self.width),
            "coding GB/s": gigabytes / statistics.median(coding),
            "decoding GB/s": gigabytes / statistics.median(decoding),
            "seconds": {"coding": coding, "decoding": decoding},
        }

    @property
    def _bytes(self) -> int:
        return int(self.words_each * self.width)

    def _calls(self) -> Iterator[slice]:
        for start in range(0, len(self._sources), self._each):
            yield slice(start, start + self._each)

    def _sound(self, verb: str) -> None:
        if self._status.any():
            raise SystemExit(f"nvCOMP could not {verb} every stream of {self._codec.name}")


def gpu_seconds(work: Callable[[], None]) -> float:
    """Return the seconds between two events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def sample(group: dict[str, Tensor]) -> Tensor:
    """Return whole chunks, evenly spread over a part of the state, as integers [chunks, words]."""
    words = torch.cat([tensor.reshape(-1) for tensor in group.values()])
    words = words.view(WORDS[words.element_size()])
    each = min(CHUNK // words.element_size(), words.numel() // 16 * 16)
    chunks = words[: words.numel() // each * each].view(-1, each)
    count = min(len(chunks), SAMPLE // CHUNK)
    return chunks[torch.arange(count, device=words.device) * len(chunks) // count].contiguous()


def coders(state: State) -> dict[str, Any]:
    """Measure every coder on every part of the state."""
    results: dict[str, Any] = {}
    for part, group in state.items():
        words = sample(group)
        results[part] = {coder: Pipeline(words, coder).measure() for coder in CODERS}
        del words
        torch.cuda.empty_cache()
    return results
