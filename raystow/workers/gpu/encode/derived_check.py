"""Checks on the GPU which chunks can be derived from others and need not be stored: see ``storage.coding.derived``.

Every word is compared: digests of tensors that somebody has chosen may be equal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.cuda import Event

from ....state.planned_chunk import PlannedDerived
from ....storage.coding.digest import finish
from ...protocol.messages import DerivedChunk
from .. import kernel_args
from ..digests import Digests
from ..kernels import copy_kernels, word_kernels
from ..uploads import Uploads

_PRIORITY = 0  # of the stream: lower than the reading, on which all copies to the host wait
_LAUNCH = 8  # chunks that one launch compares: a longer launch would delay the coder, and thereby the reading

Pairs = Sequence[PlannedDerived]


@dataclass
class DerivedCheck:
    """The result of ``DerivedChecker.check``. The first access waits for the device, and must come before ``encode`` returns.

    Args:
        pairs: All pairs.
        sums: The digests, before ``finish``, of their pieces (int64, pinned memory).
        misses: For each pair 1 if the piece is not its source, copied or rounded (int64, pinned memory).
        done: The event after which ``sums`` and ``misses`` are complete.
    """

    pairs: Pairs
    sums: torch.Tensor
    misses: torch.Tensor
    done: Event | None

    @property
    def strays(self) -> list[PlannedDerived]:
        """The pairs whose chunk cannot be derived."""
        return [pair for pair, missed in zip(self.pairs, self._missed, strict=True) if missed]

    @property
    def derived(self) -> list[DerivedChunk]:
        """The messages for chunks that can be derived."""
        found = zip(self.pairs, self._missed, self.sums.tolist(), strict=True)
        return [pair.derived(finish(total, pair.piece.nbytes)) for pair, missed, total in found if not missed]

    @functools.cached_property
    def _missed(self) -> list[bool]:
        if self.done is not None:
            self.done.synchronize()
        missed: list[bool] = self.misses.bool().tolist()
        return missed


class DerivedChecker:
    """Checks ``followers`` on one device, save after save."""

    def __init__(self, device: torch.device, followers: Pairs, uploads: Uploads | None = None) -> None:
        self.followers, self._device, self._uploads = followers, device, uploads or Uploads(device)
        self._ordered = sorted(followers, key=_kind)
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY)
        rows = np.array([_row(one) for one in self._ordered], np.int64)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._digests = Digests([one.piece for one in self._ordered], device, uploads=self._uploads)
            self._table = kernel_args.upload(rows, device)
        self._launches, end = list[tuple[slice, int, str, int]](), 0  # rows, width, ``rounded`` and ``largest`` of each
        for (rounded, width, scattered), alike in itertools.groupby(self._ordered, _kind):
            begin, end = end, end + len(list(alike))
            step = 1 if scattered else _LAUNCH  # so that there is one pair of copies at a time
            for first in range(begin, end, step):
                some = slice(first, min(first + step, end))
                self._launches.append((some, width, rounded, int(rows[some, 2].max())))

    def check(self, *, after: Event) -> DerivedCheck:
        """Begin to check, after a CUDA event."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            misses = torch.zeros(len(self._table), dtype=torch.int64, device=self._device)
            for some, width, rounded, largest in self._launches:
                table, copies = self._table[some], list[torch.Tensor]()
                if _kind(pair := self._ordered[some.start])[2]:
                    copies = self._uploads.words([pair.source]) if rounded and pair.source.on_host else []
                    copies += self._uploads.gathered([pair.piece] if copies else [pair.source, pair.piece])
                    row = np.array([[*(copy.data_ptr() for copy in copies), largest]], np.int64)
                    table = kernel_args.upload(row, self._device)
                word_kernels.compare(table, largest, width=width, rounded=rounded, misses=misses[some])
                del copies  # their memory is used again on this stream only
            missed = copy_kernels.to_host(misses)
            return DerivedCheck(self._ordered, self._digests.take(), missed, self._stream.record_event())


def check_derived(
    checkers: dict[int, DerivedChecker], device: int, followers: Pairs, *, after: Event, uploads: Uploads | None = None
) -> DerivedCheck:
    """Begin to check ``followers``, with the checker of the last save if they are the same."""
    if not followers:
        nothing = torch.empty(0, dtype=torch.int64)
        return DerivedCheck([], nothing, nothing, None)
    last = checkers.get(device)
    if last is None or last.followers is not followers:
        checkers[device] = DerivedChecker(torch.device("cuda", device), followers, uploads)
    return checkers[device].check(after=after)


def _kind(pair: PlannedDerived) -> tuple[str, int, bool]:
    """The dtype that its source is rounded to, empty if the piece is a copy; bytes of a word; whether the words as they are
    stored must be gathered. Pairs of one kind can be compared by one launch."""
    piece, source = pair.piece, pair.source
    if piece.dtype.name != source.dtype.name:
        return piece.dtype.name, piece.dtype.width, piece.on_host or source.on_host
    return "", piece.dtype.width, piece.address is None or source.address is None


def _row(pair: PlannedDerived) -> tuple[int, int, int]:
    """What ``word_kernels.compare`` needs. Addresses of what is gathered are filled in later."""
    piece, source = pair.piece, pair.source
    of = source.origin if piece.dtype.name != source.dtype.name else source.address
    return of or 0, piece.address or 0, piece.nbytes // piece.dtype.width
