"""Checks on the GPU which chunks can be derived from others and need not be stored: see ``storage.coding.derived``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.cuda import Event

from ....storage.coding.digest import finish
from ...protocol.messages import DerivedChunk
from .. import kernel_args
from ..digests import Digests
from ..encode_request import DerivedPair
from ..kernels import copy_kernels, word_kernels
from .encoder import Encoder

_PRIORITY = 0  # of the stream: lower than the reading, on which all copies to the host wait
_LAUNCH = 8  # chunks that one launch compares: a longer launch would delay the coder, and thereby the reading

Pairs = Sequence[DerivedPair]
_Indices = npt.NDArray[np.int64]


@dataclass
class DerivedCheck:
    """The result of ``DerivedChecker.check``. The first access waits for the device, and must come before ``encode`` returns.

    Args:
        pairs: First copies (``copies`` is their number), then pairs whose source the encoder rounds, then the others.
        sums: The digests, before ``finish``, of all pieces and then of the sources of the copies (int64, pinned memory).
        rounded: Returns ``BatchResults.rounded`` of the sources that the encoder rounds.
        misses: For each of the other pairs 1 if the piece is not its source rounded (int64, pinned memory).
        done: The event after which ``sums`` and ``misses`` are complete.
    """

    pairs: Pairs
    copies: int
    sums: torch.Tensor
    rounded: Callable[[], _Indices]
    misses: torch.Tensor
    done: Event | None

    @property
    def strays(self) -> list[DerivedPair]:
        """The pairs whose chunk cannot be derived."""
        return [pair for pair, missed in zip(self.pairs, self._missed, strict=True) if missed]

    @property
    def derived(self) -> list[DerivedChunk]:
        """The messages for chunks that can be derived."""
        found = zip(self.pairs, self._missed, self.sums[: len(self.pairs)].tolist(), strict=True)
        return [pair.derived(finish(total, pair.piece.nbytes)) for pair, missed, total in found if not missed]

    @functools.cached_property
    def _missed(self) -> list[bool]:
        if self.done is not None:
            self.done.synchronize()
        own, sources = np.split(self.sums.numpy(), [len(self.pairs)])
        copies = own[: self.copies] != sources
        digests, nans = self.rounded()
        rounded = (own[self.copies : self.copies + len(digests)] != digests) | (nans != 0)
        return [*copies.tolist(), *rounded.tolist(), *self.misses.bool().tolist()]


class DerivedChecker:
    """Checks ``followers`` on one device, save after save.

    ``encoder`` reads their sources meanwhile, and hashes the rounded words of those whose ``followed`` requests it. Other sources
    are read here.
    """

    def __init__(self, device: torch.device, followers: Pairs, encoder: Encoder | None = None) -> None:
        self.followers, self._device, self._encoder = followers, device, encoder
        self.plan = None if encoder is None else encoder.plan
        hashed = {} if encoder is None or encoder.plan is None else encoder.results.rounding_sources()

        def is_hashed(one: DerivedPair) -> bool:
            return id(one.source) in hashed and one.source.followed == _rounded(one)

        self._ordered = sorted(followers, key=lambda one: (_rounded(one) != "", not is_hashed(one), _rounded(one)))
        self._copies = sum(not _rounded(follower) for follower in followers)
        self._hashed = np.array([hashed[id(one.source)] for one in self._ordered if is_hashed(one)], np.int64)
        compared = self._ordered[self._copies + len(self._hashed) :]
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            of = [one.piece for one in self._ordered] + [one.source for one in self._ordered[: self._copies]]
            self._digests = Digests(of, device)
            rows = np.array([(one.source.origin, one.piece.address, one.piece.nbytes // 2) for one in compared], np.int64)
            self._table = kernel_args.upload(rows.reshape(-1, 3), device)
        self._batches, end = list[tuple[str, slice, int]](), 0
        for dtype, alike in itertools.groupby(compared, _rounded):
            begin, end = end, end + len(list(alike))
            for first in range(begin, end, _LAUNCH):
                some = slice(first, min(first + _LAUNCH, end))
                self._batches.append((dtype, some, int(rows[some, 2].max())))

    def check(self, *, after: Event) -> DerivedCheck:
        """Begin to check, after a CUDA event."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            misses = torch.zeros(len(self._table), dtype=torch.int64, device=self._device)
            for dtype, some, largest in self._batches:
                word_kernels.compare(self._table[some], largest, dtype=dtype, misses=misses[some])
            missed = copy_kernels.to_host(misses)
            sums = self._digests.take()
            return DerivedCheck(self._ordered, self._copies, sums, self._rounding_results, missed, self._stream.record_event())

    def _rounding_results(self) -> _Indices:
        """Return ``BatchResults.rounded`` of the sources that the encoder rounds."""
        if self._encoder is None:
            return np.empty((2, 0), np.int64)
        return self._encoder.results.rounded()[:, self._hashed]


def check_derived(
    checkers: dict[int, DerivedChecker], device: int, followers: Pairs, *, after: Event, encoder: Encoder | None = None
) -> DerivedCheck:
    """Begin to check ``followers``, with the checker of the last save if they and the encoder's plan are the same."""
    if not followers:
        nothing = torch.empty(0, dtype=torch.int64)
        return DerivedCheck([], 0, nothing, lambda: np.empty((2, 0), np.int64), nothing, None)
    last = checkers.get(device)
    plan = None if encoder is None else encoder.plan
    if last is None or last.followers is not followers or last.plan is not plan:
        checkers[device] = DerivedChecker(torch.device("cuda", device), followers, encoder)
    return checkers[device].check(after=after)


def _rounded(follower: DerivedPair) -> str:
    """Return the dtype that its source is rounded to; empty if it is a copy."""
    dtype = follower.piece.dtype.name
    return dtype if follower.source.dtype.name != dtype else ""
