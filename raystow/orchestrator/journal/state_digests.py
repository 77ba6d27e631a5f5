"""Digests of a training state, of all its bytes or of a fixed sample, one for each tensor.

They tell whether a replayed step has led to the recorded state. The sample of a tensor are four blocks of 4 KiB, whose places
depend on its name and size only; smaller tensors are covered whole. A CPU and a GPU compute the same digests.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...storage.coding.digest import raw_digest, stored_digest
from .tracked_state import TrackedState

_BLOCK = 4096
_BLOCKS = 4
_PIECE = 16 << 20
_TINY = 64  # bytes; such tensors in host memory share one digest

_Numbers = npt.NDArray[np.uint64]
Spans = tuple[tuple[int, int], ...]
"""First byte and the one after the last."""


class PendingDigests(Protocol):
    """Digests that a device may still be computing."""

    def numbers(self) -> _Numbers:
        """Wait for them: uint64 [spans]."""


class StateDigests(NamedTuple):
    """Digests of the state, which is named in ``names`` in the same order."""

    names: list[str]
    spans: list[int]  # how many each tensor has
    parts: list[tuple[list[int], PendingDigests]]  # numbers of spans, and their digests
    values: int

    def packed(self) -> bytes:
        """One number of 64 bits for each tensor, and one for the rest; waits for the device."""
        found = np.zeros(sum(self.spans), np.uint64)
        for places, pending in self.parts:
            found[places] = pending.numbers()
        ends = np.cumsum([0, *self.spans])
        merged = [_merge(found[first:last]) for first, last in itertools.pairwise(ends)]
        return np.array([*merged, self.values], "<u8").tobytes()


def digests(state: TrackedState, *, whole: bool) -> StateDigests:
    """Take the digests of a state. Those of tensors on a GPU are taken on the current stream."""
    tiny, names, spans = list[bytes](), list[str](), list[Spans]()
    host, host_places, devices = list[int](), list[int](), dict[int, tuple[list[int], list[tuple[torch.Tensor, int, int]]]]()
    at = 0
    for name, tensor in state.tensors():
        nbytes = tensor.numel() * tensor.itemsize
        if tensor.device.type == "cpu" and nbytes <= _TINY:
            tiny.append(name.encode() + _bytes(tensor).tobytes())
            continue
        mine = _whole_spans(nbytes) if whole else _sample_spans(name, nbytes)
        names.append(name)
        spans.append(mine)
        if tensor.device.type == "cuda":
            places, pieces = devices.setdefault(tensor.device.index, ([], []))
            places += range(at, at + len(mine))
            pieces += [(tensor, first, last) for first, last in mine]
        else:
            raw = _bytes(tensor)
            host += [raw_digest(raw[first:last]) for first, last in mine]
            host_places += range(at, at + len(mine))
        at += len(mine)
    values = int.from_bytes(stored_digest(state.plain_values().encode(), *tiny)[:8], "little")
    parts: list[tuple[list[int], PendingDigests]] = [(host_places, _Known(np.array(host, np.uint64)))]
    parts += [(places, _on_gpu(device, pieces)) for device, (places, pieces) in devices.items()]
    return StateDigests(names, [len(mine) for mine in spans], parts, values)


def difference(state: TrackedState, expected: bytes, *, whole: bool) -> str | None:
    """The first tensor of a state whose digest is not ``expected``; None if all are."""
    taken = digests(state, whole=whole)
    got, recorded = np.frombuffer(taken.packed(), "<u8"), np.frombuffer(expected, "<u8")
    if got.size != recorded.size:
        return f"the number of tensors ({got.size - 1} instead of {recorded.size - 1})"
    wrong = np.flatnonzero(got != recorded)
    return None if not wrong.size else [*taken.names, "the optimizer's plain values"][wrong[0]]


class _Known(NamedTuple):
    found: _Numbers

    def numbers(self) -> _Numbers:
        return self.found


def _on_gpu(device: int, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> PendingDigests:
    from ...workers.gpu.span_digests import SpanDigests

    return SpanDigests.taken(device, pieces)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    raw: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _merge(found: _Numbers) -> int:
    return int(found[0]) if found.size == 1 else int.from_bytes(stored_digest(found.tobytes())[:8], "little")


@functools.lru_cache(maxsize=1 << 14)
def _whole_spans(nbytes: int) -> Spans:
    return tuple((first, min(first + _PIECE, nbytes)) for first in range(0, max(nbytes, 1), _PIECE))


@functools.lru_cache(maxsize=1 << 14)
def _sample_spans(name: str, nbytes: int) -> Spans:
    if nbytes <= _BLOCK * _BLOCKS:
        return ((0, nbytes),)
    share = nbytes // _BLOCKS // _BLOCK  # blocks in each quarter
    seed = stored_digest(f"{name} {nbytes}".encode())
    numbers = [int.from_bytes(seed[8 * i : 8 * i + 8], "little") % share + i * share for i in range(_BLOCKS)]
    return tuple((_BLOCK * number, _BLOCK * (number + 1)) for number in numbers)
