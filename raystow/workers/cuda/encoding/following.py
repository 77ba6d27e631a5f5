"""Which chunks in device memory follow from others, so that they need not leave it: see ``storage.coding.derived``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....storage.coding.digest import finish
from .. import kernels
from ..digests import Digests

_LATER = 0  # priority: behind what is read meanwhile, on which all copies to the host wait
_AT_ONCE = 8  # chunks that one launch compares: a longer one keeps the coder waiting, and thereby the reading


class Following:
    """What comes of ``Lookout.look``. The first look at it waits for the device.

    ``sums``: the digests of all ``followers``, before ``finish``, and then those of what the first of them, the ``copies``, are
    copies of. ``misses``: of the others, 1 for each that is not its source rounded. Both int64 in pinned memory.
    """

    def __init__(self, followers: Sequence[Any], copies: int, sums: torch.Tensor, misses: torch.Tensor, done: Any) -> None:
        self._followers, self._copies, self._sums, self._misses, self._done = followers, copies, sums, misses, done

    @property
    def strays(self) -> list[Any]:
        """Those that do not follow."""
        return [follower for follower, missed in zip(self._followers, self._missed(), strict=True) if missed]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What is said of those that do."""
        found = zip(self._followers, self._missed(), self._sums[: len(self._followers)].tolist(), strict=True)
        return [{**one.describe(), "digest": finish(total, one.piece.nbytes)} for one, missed, total in found if not missed]

    def _missed(self) -> list[bool]:
        if self._done is not None:
            self._done.synchronize()
        own, others = self._sums[: self._copies], self._sums[len(self._followers) :]
        return [*(own != others).tolist(), *self._misses.bool().tolist()]


class Lookout:
    """Looks at ``followers`` (see ``staging.Follower``) on one device, save after save."""

    def __init__(self, device: torch.device, followers: Sequence[Any]) -> None:
        self.followers = followers
        self._device, self._ordered = device, sorted(followers, key=_rounded)
        self._copies = sum(not _rounded(follower) for follower in followers)
        rounded = self._ordered[self._copies :]
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device, priority=_LATER)):
            self._stream = stream
            of = [one.piece for one in self._ordered] + [one.source for one in self._ordered[: self._copies]]
            self._digests = Digests(of, device)
            rows = np.array([(one.source.origin, one.piece.address, one.piece.nbytes // 2) for one in rounded], np.int64)
            self._table = torch.from_numpy(rows.reshape(-1, 3)).pin_memory().to(device, non_blocking=True)
        self._batches, end = list[tuple[str, slice, int]](), 0
        for dtype, alike in itertools.groupby(rounded, _rounded):
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
                kernels.compare(self._table[some], largest, dtype=dtype, misses=misses[some])
            told = torch.empty(misses.shape, dtype=torch.int64, pin_memory=True)
            kernels.tell(misses, told)
            sums = self._digests.take()
            return Following(self._ordered, self._copies, sums, told, self._stream.record_event())


def follow(lookouts: dict[int, Lookout], device: int, followers: Sequence[Any], *, after: Any) -> Following:
    """``Lookout.look``, with the last one of the device if it is for the same followers."""
    if not followers:
        nothing = torch.empty(0, dtype=torch.int64)
        return Following([], 0, nothing, nothing, None)
    if device not in lookouts or lookouts[device].followers is not followers:
        lookouts[device] = Lookout(torch.device("cuda", device), followers)
    return lookouts[device].look(after=after)


def _rounded(follower: Any) -> str:
    """The dtype that its source is rounded to; nothing, if it is a copy."""
    dtype: str = follower.piece.dtype.name
    return dtype if follower.source.dtype.name != dtype else ""
