"""Checks on the GPU which chunks can be derived from others and need not be stored: see ``storage.coding.derived``.

Every word is compared: digests of tensors that somebody has chosen may be equal.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.cuda import Event

from ....state.planned_chunk import PlannedDerived
from ....storage.coding.digest import finish
from ....storage.runtime.batches import batches
from ...protocol.messages import DerivedChunk
from .. import kernel_args
from ..digests import Digests
from ..encode_request import Source
from ..kernels import copy_kernels, word_kernels
from ..uploads import Uploads

_PRIORITY = 0  # of the stream: lower than the reading, on which all copies to the host wait
_LAUNCH = 8  # chunks that one launch compares: a longer launch would delay the coder, and thereby the reading
_COPIED = 128 << 20  # bytes of pairs that are copied in device memory at a time

Pairs = Sequence[PlannedDerived]


class _Part(NamedTuple):
    """Results of some pairs, in pinned memory once the device has come so far: the digest of each piece, before ``finish``, and 1
    if the piece is not its source, copied or rounded (int64 [pairs])."""

    pairs: Pairs
    sums: torch.Tensor
    misses: torch.Tensor


class DerivedCheck:
    """The check of one save. ``begin`` and ``uploaded`` launch it; results must be asked for before ``encode`` returns, when all
    chunks have been read."""

    def __init__(self, checker: DerivedChecker | None) -> None:
        self._checker, self._parts = checker, list[_Part]()
        self._done: Event | None = None

    def begin(self, *, after: Event) -> None:
        """Begin to check, after a CUDA event, the pairs that ``uploaded`` does not."""
        if self._checker is not None:
            parts, self._done = self._checker.check(after)
            self._parts += parts

    def uploaded(self, sources: Sequence[Source], words: Sequence[torch.Tensor]) -> None:
        """Check what is derived from chunks in host memory. ``words``: theirs, as uint8, on the current stream of the device."""
        if self._checker is not None:
            self._parts += self._checker.check_uploaded(sources, words)

    @property
    def strays(self) -> list[PlannedDerived]:
        """The pairs whose chunk cannot be derived."""
        return [pair for pair, missed, _ in self._results if missed]

    @property
    def derived(self) -> list[DerivedChunk]:
        """The messages for chunks that can be derived."""
        return [pair.derived(finish(total, pair.piece.nbytes)) for pair, missed, total in self._results if not missed]

    @functools.cached_property
    def _results(self) -> list[tuple[PlannedDerived, int, int]]:
        if self._done is not None:
            self._done.synchronize()
        return [row for part in self._parts for row in zip(part.pairs, part.misses.tolist(), part.sums.tolist(), strict=True)]


class DerivedChecker:
    """Checks ``followers`` on one device, save after save. ``pieces``: the chunks that are encoded, whose words in host memory
    ``check_uploaded`` receives: they cross the link once."""

    def __init__(
        self, device: torch.device, followers: Pairs, pieces: Sequence[Source] = (), uploads: Uploads | None = None
    ) -> None:
        self.followers, self.pieces = followers, pieces
        self._device, self._uploads = device, uploads or Uploads(device)
        encoded = {id(piece) for piece in pieces}
        apart, self._of_source = list[PlannedDerived](), defaultdict[int, list[PlannedDerived]](list)
        for pair in followers:
            if pair.piece.on_host and id(pair.source) in encoded:
                self._of_source[id(pair.source)].append(pair)
            else:
                apart.append(pair)
        placed = sorted((pair for pair in apart if _is_placed(pair)), key=_kind)
        self._placed, self._copied = placed, sorted((pair for pair in apart if not _is_placed(pair)), key=_kind)
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY)
        rows = np.array([_row(pair) for pair in placed], np.int64).reshape(-1, 3)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._digests = Digests([pair.piece for pair in placed], device, uploads=self._uploads)
            self._table = kernel_args.upload(rows, device)
        self._launches, end = list[tuple[slice, int, str, int]](), 0  # rows, width, ``rounded`` and ``largest`` of each
        for (rounded, width), alike in itertools.groupby(placed, _kind):
            for pairs in batches(alike, lambda pair: 1, _LAUNCH):
                some = slice(end, end := end + len(pairs))
                self._launches.append((some, width, rounded, int(rows[some, 2].max())))

    def check(self, after: Event) -> tuple[list[_Part], Event]:
        """Begin to check, after a CUDA event, the pairs that ``check_uploaded`` does not; return the event at the end."""
        parts = list[_Part]()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            if self._placed:
                misses = torch.zeros(len(self._placed), dtype=torch.int64, device=self._device)
                for some, width, rounded, largest in self._launches:
                    word_kernels.compare(self._table[some], largest, width=width, rounded=rounded, misses=misses[some])
                sums = self._digests.on_device()[0]
                parts.append(_Part(self._placed, copy_kernels.to_host(sums), copy_kernels.to_host(misses)))
            parts += [self._compare(pairs, *self._copies(pairs)) for pairs in _alike(self._copied)]
            return parts, self._stream.record_event()

    def check_uploaded(self, sources: Sequence[Source], words: Sequence[torch.Tensor]) -> list[_Part]:
        """Begin to check what is derived from ``sources``, on the current stream. ``words``: see ``DerivedCheck.uploaded``."""
        of = {id(source): copy for source, copy in zip(sources, words, strict=True)}
        found = sorted((pair for source in sources for pair in self._of_source.get(id(source), ())), key=_kind)
        return [
            self._compare(pairs, [of[id(pair.source)] for pair in pairs], self._uploads.words([pair.piece for pair in pairs]))
            for pairs in _alike(found)
        ]

    def _compare(self, pairs: Pairs, sources: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> _Part:
        """Compare copies of pairs of one kind, on the current stream. Words of host memory are those before rounding."""
        (rounded, width), largest = _kind(pairs[0]), max(pair.piece.nbytes for pair in pairs) // _kind(pairs[0])[1]
        rows = [(a.data_ptr(), b.data_ptr(), b.nbytes // width) for a, b in zip(sources, pieces, strict=True)]
        sums, misses = (torch.zeros(len(pairs), dtype=torch.int64, device=self._device) for _ in range(2))
        table = kernel_args.upload(np.array(rows, np.int64), self._device)
        word_kernels.compare(table, largest, width=width, rounded=rounded, misses=misses)
        stored = [pair.piece.gather(one) if pair.piece.on_host else one for pair, one in zip(pairs, pieces, strict=True)]
        self._digests.add_copies(range(len(pairs)), stored, width, sums[None])
        return _Part(pairs, copy_kernels.to_host(sums), copy_kernels.to_host(misses))

    def _copies(self, pairs: Pairs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the words of all sources and of all pieces. Of host memory those before rounding."""
        ends = [*(pair.source for pair in pairs), *(pair.piece for pair in pairs)]
        uploaded = iter(self._uploads.words([one for one in ends if one.on_host]))
        copies = [next(uploaded) if one.on_host else one.gather() for one in ends]
        return copies[: len(pairs)], copies[len(pairs) :]


def check_derived(
    checkers: dict[int, DerivedChecker],
    device: int,
    followers: Pairs,
    pieces: Sequence[Source] = (),
    uploads: Uploads | None = None,
) -> DerivedCheck:
    """Return a check of ``followers``, with the checker of the last save if they and the encoded ``pieces`` are the same."""
    if not followers:
        return DerivedCheck(None)
    last = checkers.get(device)
    if last is None or last.followers is not followers or last.pieces is not pieces:
        last = checkers[device] = DerivedChecker(torch.device("cuda", device), followers, pieces, uploads)
    return DerivedCheck(last)


def _alike(pairs: Pairs) -> list[Pairs]:
    """Pairs, sorted by kind, in batches of one kind."""
    return [some for _, alike in itertools.groupby(pairs, _kind) for some in batches(list(alike), _nbytes, _COPIED)]


def _kind(pair: PlannedDerived) -> tuple[str, int]:
    """The dtype that its source is rounded to, empty if the piece is a copy; bytes of a word. Pairs of one kind can be compared
    by one launch."""
    piece, source = pair.piece.dtype, pair.source.dtype
    return piece.name if piece.name != source.name else "", piece.width


def _is_placed(pair: PlannedDerived) -> bool:
    """Whether the words can be compared where they are."""
    return all(_row(pair)[:2])


def _nbytes(pair: PlannedDerived) -> int:
    return pair.piece.nbytes + pair.source.nbytes


def _row(pair: PlannedDerived) -> tuple[int, int, int]:
    """What ``word_kernels.compare`` needs; an address is 0 if the words must be copied."""
    piece, source = pair.piece, pair.source
    of = source.origin if piece.dtype.name != source.dtype.name else source.address
    return of or 0, piece.address or 0, piece.nbytes // piece.dtype.width
