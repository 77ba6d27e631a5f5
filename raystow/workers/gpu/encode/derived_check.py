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
from ....storage.runtime.batches import batches
from ...protocol.messages import DerivedChunk
from .. import kernel_args
from ..digests import Digests
from ..kernels import copy_kernels, word_kernels
from ..uploads import Uploads

_PRIORITY = 0  # of the stream: lower than the reading, on which all copies to the host wait
_LAUNCH = 8  # chunks that one launch compares: a longer launch would delay the coder, and thereby the reading
_COPIED = 128 << 20  # bytes of pairs that are copied in device memory at a time

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
            placed = [i for i, one in enumerate(self._ordered) if not _kind(one)[2]]
            self._digests = Digests([self._ordered[i].piece for i in placed], device, uploads=self._uploads)
            self._table = kernel_args.upload(rows, device)
            self._placed = kernel_args.upload(np.array(placed), device) if placed else None
        self._sizes = rows[:, 2]
        self._launches, end = list[tuple[slice, int, str, int]](), 0  # rows, width, ``rounded`` and ``largest`` of each
        for (rounded, width, scattered), alike in itertools.groupby(self._ordered, _kind):
            for pairs in batches(alike, _copied, _COPIED) if scattered else batches(alike, lambda pair: 1, _LAUNCH):
                some = slice(end, end := end + len(pairs))
                self._launches.append((some, width, rounded, int(rows[some, 2].max())))

    def check(self, *, after: Event) -> DerivedCheck:
        """Begin to check, after a CUDA event."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            sums, misses = (torch.zeros(len(self._ordered), dtype=torch.int64, device=self._device) for _ in range(2))
            for some, width, rounded, largest in self._launches:
                pairs, table, copies = self._ordered[some], self._table[some], list[torch.Tensor]()
                if _kind(pairs[0])[2]:
                    copies = self._copies(pairs, rounded)
                    rows = np.array([copy.data_ptr() for copy in copies]).reshape(2, -1)
                    table = kernel_args.upload(np.stack([*rows, self._sizes[some]], axis=1), self._device)
                    self._digests.add_copies(range(some.start, some.stop), copies[len(pairs) :], width, sums[None])
                word_kernels.compare(table, largest, width=width, rounded=rounded, misses=misses[some])
                del copies  # their memory is used again on this stream only
            if self._placed is not None:
                sums[self._placed] = self._digests.on_device()[0]
            found, missed = copy_kernels.to_host(sums), copy_kernels.to_host(misses)
            return DerivedCheck(self._ordered, found, missed, self._stream.record_event())

    def _copies(self, pairs: Pairs, rounded: str) -> list[torch.Tensor]:
        """Return the words of all sources, then those of all pieces. Those of sources in host memory are not rounded by their own
        rule if the pieces are rounded from them."""
        ends = [*(pair.source for pair in pairs), *(pair.piece for pair in pairs)]
        copies = iter(self._uploads.words([one for one in ends if one.on_host]))
        exact = len(pairs) if rounded else 0
        return [
            (next(copies) if i < exact else one.gather(next(copies))) if one.on_host else one.gather()
            for i, one in enumerate(ends)
        ]


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


def _copied(pair: PlannedDerived) -> int:
    return pair.piece.nbytes + pair.source.nbytes


def _row(pair: PlannedDerived) -> tuple[int, int, int]:
    """What ``word_kernels.compare`` needs. Addresses of what is gathered are filled in later."""
    piece, source = pair.piece, pair.source
    of = source.origin if piece.dtype.name != source.dtype.name else source.address
    return of or 0, piece.address or 0, piece.nbytes // piece.dtype.width
