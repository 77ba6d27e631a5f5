"""Which chunks in device memory follow from others, so that they need not leave it: see ``storage.coding.derived``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....storage.coding.digest import finish
from ...protocol.messages import DerivedChunk
from ..digests import Digests
from ..kernels import copy_kernels, word_kernels
from .encoder import Encoder

_LATER = 0  # priority: behind what is read meanwhile, on which all copies to the host wait
_AT_ONCE = 8  # chunks that one launch compares: a longer one keeps the coder waiting, and thereby the reading


class Following:
    """What comes of ``Lookout.look``. The first look at it waits for the device, and is to be had before ``encode`` returns.

    ``sums``: the digests of all ``followers``, before ``finish``, and then those of what the first of them, the ``copies``, are
    copies of. ``rounded``: what ``Found.rounded`` says of the sources of those that come next. ``misses``: of the others, 1 for
    each that is not its source rounded. ``sums`` and ``misses`` are int64 in pinned memory.
    """

    def __init__(
        self,
        followers: Sequence[Any],
        copies: int,
        sums: torch.Tensor,
        rounded: Callable[[], Any],
        misses: torch.Tensor,
        done: Any,
    ) -> None:
        self._followers, self._copies, self._sums = followers, copies, sums
        self._rounded, self._misses, self._done = rounded, misses, done

    @property
    def strays(self) -> list[Any]:
        """Those that do not follow."""
        return [follower for follower, missed in zip(self._followers, self._missed, strict=True) if missed]

    @property
    def derived(self) -> list[DerivedChunk]:
        """Those that do."""
        found = zip(self._followers, self._missed, self._sums[: len(self._followers)].tolist(), strict=True)
        return [one.derived(finish(total, one.piece.nbytes)) for one, missed, total in found if not missed]

    @functools.cached_property
    def _missed(self) -> list[bool]:
        if self._done is not None:
            self._done.synchronize()
        own, others = np.split(self._sums.numpy(), [len(self._followers)])
        copies = own[: self._copies] != others
        made, nans = self._rounded()
        rounded = (own[self._copies : self._copies + len(made)] != made) | (nans != 0)
        return [*copies.tolist(), *rounded.tolist(), *self._misses.bool().tolist()]


class Lookout:
    """Looks at ``followers`` (see ``staging.Follower``) on one device, save after save. ``encoder``: the one that reads their
    sources meanwhile, and takes the digests of what these are rounded to where their ``followed`` asks for it. Else, or for other
    sources, this reads them, too."""

    def __init__(self, device: torch.device, followers: Sequence[Any], encoder: Encoder | None = None) -> None:
        self.followers, self._device, self._encoder = followers, device, encoder
        self.program = None if encoder is None else encoder.program
        told = {} if encoder is None or encoder.program is None else encoder.found.followed(encoder.program)

        def is_told(one: Any) -> bool:
            return id(one.source) in told and one.source.followed == _rounded(one)

        self._ordered = sorted(followers, key=lambda one: (_rounded(one) != "", not is_told(one), _rounded(one)))
        self._copies = sum(not _rounded(follower) for follower in followers)
        self._told = np.array([told[id(one.source)] for one in self._ordered if is_told(one)], np.int64)
        compared = self._ordered[self._copies + len(self._told) :]
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device, priority=_LATER)):
            self._stream = stream
            of = [one.piece for one in self._ordered] + [one.source for one in self._ordered[: self._copies]]
            self._digests = Digests(of, device)
            rows = np.array([(one.source.origin, one.piece.address, one.piece.nbytes // 2) for one in compared], np.int64)
            self._table = torch.from_numpy(rows.reshape(-1, 3)).pin_memory().to(device, non_blocking=True)
        self._batches, end = list[tuple[str, slice, int]](), 0
        for dtype, alike in itertools.groupby(compared, _rounded):
            begin, end = end, end + len(list(alike))
            for first in range(begin, end, _AT_ONCE):
                some = slice(first, min(first + _AT_ONCE, end))
                self._batches.append((dtype, some, int(rows[some, 2].max())))

    def look(self, *, after: Any) -> Following:
        """Begin to look, when the CUDA event ``after`` has come."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            misses = torch.zeros(len(self._table), dtype=torch.int64, device=self._device)
            for dtype, some, largest in self._batches:
                word_kernels.compare(self._table[some], largest, dtype=dtype, misses=misses[some])
            told = torch.empty(misses.shape, dtype=torch.int64, pin_memory=True)
            copy_kernels.tell(misses, told)
            sums = self._digests.take()
            return Following(self._ordered, self._copies, sums, self._found, told, self._stream.record_event())

    def _found(self) -> Any:
        """Of the sources whose rounded words' digests are taken: see ``Found.rounded``."""
        if self._encoder is None:
            return np.empty((2, 0), np.int64)
        assert self._encoder.program is not None
        return self._encoder.found.rounded(self._encoder.program)[:, self._told]


def follow(
    lookouts: dict[int, Lookout], device: int, followers: Sequence[Any], *, after: Any, encoder: Encoder | None = None
) -> Following:
    """``Lookout.look``, with the last one of the device if it is for the same followers and the encoder reads the same."""
    if not followers:
        nothing = torch.empty(0, dtype=torch.int64)
        return Following([], 0, nothing, lambda: np.empty((2, 0), np.int64), nothing, None)
    last = lookouts.get(device)
    program = None if encoder is None else encoder.program
    if last is None or last.followers is not followers or last.program is not program:
        lookouts[device] = Lookout(torch.device("cuda", device), followers, encoder)
    return lookouts[device].look(after=after)


def _rounded(follower: Any) -> str:
    """The dtype that its source is rounded to; nothing, if it is a copy."""
    dtype: str = follower.piece.dtype.name
    return dtype if follower.source.dtype.name != dtype else ""
