"""Digests of a training state, of all its bytes or of a fixed sample, one for each tensor.

They tell whether a replayed step has led to the recorded state. The sample of a tensor are four blocks of 4 KiB, whose places
depend on its name and size only; smaller tensors are covered whole. A CPU and a GPU compute the same digests.

The digest of a tensor is a sum of its words, each times a number that depends on its place. So ranks that have a part each can
add up the digest of the whole: see ``shard_check``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...storage.coding.digest import raw_digest, stored_digest, unfinished, word_keys
from .tracked_state import NamedTensor, TrackedState

_BLOCK = 4096
_BLOCKS = 4
_PIECE = 16 << 20
_SPAN_KEYS = word_keys(1 << 40)

_Numbers = npt.NDArray[np.uint64]
Spans = tuple[tuple[int, int], ...]
"""First byte and the one after the last."""


Piece = tuple[torch.Tensor, int, int]
"""A tensor, and a span of its bytes."""


PendingDigests = Callable[[], _Numbers]
"""Waits for digests that a device may still be computing: uint64 [spans]."""


class StateDigests(NamedTuple):
    """Digests of the state, which is named in ``names`` in the same order."""

    names: list[str]
    spans: list[int]  # how many each tensor has
    sizes: list[int]  # bytes of each span
    parts: list[tuple[list[int], PendingDigests]]  # numbers of spans, and their digests
    values: int

    def packed(self) -> bytes:
        """One number of 64 bits for each tensor, and one for the rest; waits for the device."""
        found = np.zeros(sum(self.spans), np.uint64)
        for places, pending in self.parts:
            found[places] = pending()
        totals = unfinished(found, np.array(self.sizes, np.uint64))
        ends = np.cumsum([0, *self.spans])
        merged = [merged_spans(totals[first:last]) for first, last in itertools.pairwise(ends)]
        return np.array([*merged, self.values], "<u8").tobytes()


class DigestPlan(NamedTuple):
    """What to digest of a list of tensors: names and spans of all but the single numbers.

    ``numbers``: tensors of one element in host memory, as optimizers count steps. They share one digest. ``devices``: for each
    device places in the list of spans, and what takes their digests.
    """

    of: list[NamedTensor]
    names: list[str]
    spans: list[Spans]
    numbers: list[NamedTensor]
    devices: list[tuple[list[int], Callable[[], PendingDigests]]]


class Digester:
    """Takes digests of one state. Plans are made again only when tensors have moved: each step takes digests."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._plans: dict[bool, DigestPlan] = {}

    def take(self, *, whole: bool) -> StateDigests:
        """Take the digests of the state. Those of tensors on a GPU are taken on the current stream."""
        tensors = self._state.tensors()
        self._plans = {of: plan for of, plan in self._plans.items() if plan.of is tensors}  # the others hold old tensors
        plan = self._plans.get(whole) or self._plans.setdefault(whole, _plan(tensors, whole=whole))
        parts = [(places, take()) for places, take in plan.devices]
        sizes = [last - first for mine in plan.spans for first, last in mine]
        return StateDigests(plan.names, [len(mine) for mine in plan.spans], sizes, parts, self._values(plan.numbers))

    def values(self) -> int:
        """The digest of the optimizers' plain values and single numbers."""
        return self._values([one for one in self._state.tensors() if is_number(one.tensor)])

    def _values(self, numbers: Sequence[NamedTensor]) -> int:
        found = [one.name.encode() + bytes_of(one.tensor).tobytes() for one in numbers]
        return int.from_bytes(stored_digest(self._state.plain_values().encode(), *found)[:8], "little")

    def difference(self, expected: bytes, *, whole: bool) -> str | None:
        """The first tensor of the state whose digest is not ``expected``; None if all are."""
        taken = self.take(whole=whole)
        got, recorded = np.frombuffer(taken.packed(), "<u8"), np.frombuffer(expected, "<u8")
        if got.size != recorded.size:
            return f"the number of tensors ({got.size - 1} instead of {recorded.size - 1})"
        wrong = np.flatnonzero(got != recorded)
        return None if not wrong.size else [*taken.names, "the optimizer's plain values"][wrong[0]]


def _plan(tensors: list[NamedTensor], *, whole: bool) -> DigestPlan:
    plan = DigestPlan(tensors, [], [], [], [])
    devices = dict[torch.device, tuple[list[int], list[Piece]]]()
    at = 0
    for one in tensors:
        tensor = one.tensor
        if is_number(tensor):
            plan.numbers.append(one)
            continue
        mine = spans(one.name, tensor.numel() * tensor.itemsize, whole=whole)
        plan.names.append(one.name)
        plan.spans.append(mine)
        places, pieces = devices.setdefault(tensor.device, ([], []))
        places += range(at, at + len(mine))
        pieces += [(tensor, first, last) for first, last in mine]
        at += len(mine)
    for device, (places, pieces) in devices.items():
        plan.devices.append((places, _on_gpu(device, pieces) if device.type == "cuda" else _on_host(pieces)))
    return plan


def _on_host(pieces: Sequence[Piece]) -> Callable[[], PendingDigests]:
    def take() -> PendingDigests:
        found = np.array([raw_digest(bytes_of(tensor)[first:last]) for tensor, first, last in pieces], np.uint64)
        return lambda: found

    return take


def _on_gpu(device: torch.device, pieces: Sequence[Piece]) -> Callable[[], PendingDigests]:
    from ...workers.gpu.span_digests import span_digests

    return span_digests(device, pieces)


def is_number(tensor: torch.Tensor) -> bool:
    """Whether it is a single number in host memory."""
    return bool(tensor.dim() == 0 and tensor.device.type == "cpu")


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in host memory, in order."""
    raw: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def merged_spans(totals: _Numbers) -> np.uint64:
    """The digest of a tensor from the totals of its spans."""
    found: np.uint64 = (totals * np.resize(_SPAN_KEYS, totals.size)).sum(dtype=np.uint64)
    return found


def spans(name: str, nbytes: int, *, whole: bool) -> Spans:
    """The parts that are digested of the tensor ``name`` of so many bytes."""
    return whole_spans(nbytes) if whole else _sample_spans(name, nbytes)


@functools.lru_cache(maxsize=1 << 14)
def whole_spans(nbytes: int) -> Spans:
    """The spans of all bytes of a tensor, each of which has a digest."""
    return tuple((first, min(first + _PIECE, nbytes)) for first in range(0, max(nbytes, 1), _PIECE))


@functools.lru_cache(maxsize=1 << 14)
def _sample_spans(name: str, nbytes: int) -> Spans:
    if nbytes <= _BLOCK * _BLOCKS:
        return ((0, nbytes),)
    share = nbytes // _BLOCKS // _BLOCK  # blocks in each quarter
    seed = stored_digest(f"{name} {nbytes}".encode())
    numbers = [int.from_bytes(seed[8 * i : 8 * i + 8], "little") % share + i * share for i in range(_BLOCKS)]
    return tuple((_BLOCK * number, _BLOCK * (number + 1)) for number in numbers)
