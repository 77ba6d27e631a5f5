"""Which chunks in device memory follow from others, so that they need not leave it: see ``storage.derived``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...storage.digest import finish
from . import kernels
from .digests import digests

_SOON = -1  # priority: a millisecond, before anything is read


class Following:
    """What comes of ``follow``. The first look at it waits for the device.

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


def follow(device: torch.device, followers: Sequence[Any], *, after: Any) -> Following:
    """Begin to look at ``followers`` (see ``staging.Follower``), when the CUDA event ``after`` has come."""
    if not followers:
        nothing = torch.empty(0, dtype=torch.int64)
        return Following([], 0, nothing, nothing, None)
    ordered = sorted(followers, key=_rounded)
    copies = sum(not _rounded(follower) for follower in ordered)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=_SOON)):
        torch.cuda.current_stream(device).wait_event(after)
        sums = digests([one.piece for one in ordered] + [one.source for one in ordered[:copies]], device)
        misses = torch.zeros(len(ordered) - copies, dtype=torch.int64, device=device)
        rows = np.array([(one.source.address, one.piece.address, one.piece.nbytes // 2) for one in ordered[copies:]], np.int64)
        table, end = torch.from_numpy(rows.reshape(-1, 3)).pin_memory().to(device, non_blocking=True), 0
        for dtype, alike in itertools.groupby(ordered[copies:], _rounded):
            begin, end = end, end + len(list(alike))
            kernels.compare(table[begin:end], int(rows[begin:end, 2].max()), dtype=dtype, misses=misses[begin:end])
        told = torch.empty(misses.shape, dtype=torch.int64, pin_memory=True)
        kernels.tell(misses, told)
        return Following(ordered, copies, sums, told, torch.cuda.current_stream(device).record_event())


def _rounded(follower: Any) -> str:
    """The dtype that its source is rounded to; nothing, if it is a copy."""
    dtype: str = follower.piece.dtype.name
    return dtype if follower.source.dtype.name != dtype else ""
