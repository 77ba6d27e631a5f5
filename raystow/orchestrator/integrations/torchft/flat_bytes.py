"""The bytes of many tensors as one sequence, which is copied chunk by chunk."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....storage.coding.kernels import Bytes
from ...save.state_tree import Elements

CHUNK = 4 << 20
"""Bytes of a chunk, the last one excepted."""

ALIGN = 64
"""Tensors begin at multiples of this many bytes."""


@dataclass(frozen=True)
class FlatPiece:
    """A tensor of ``nbytes`` bytes at ``start``. ``content``: uint8; a torch tensor on a device; None if it is unknown."""

    start: int
    nbytes: int
    content: Bytes | torch.Tensor | None


class FlatBytes:
    """``pieces``: ascending, none empty. Bytes between them are zero."""

    def __init__(self, pieces: Sequence[FlatPiece]) -> None:
        self._pieces, self._starts = pieces, [piece.start for piece in pieces]

    def copy(self, start: int, into: Bytes) -> bool:
        """Fill ``into`` with the bytes from ``start``; return False if some of them are unknown."""
        end, at = start + into.size, start
        for piece in self._pieces[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if piece.start >= end:
                break
            first, last = max(piece.start, start), min(piece.start + piece.nbytes, end)
            if first >= last:
                continue
            if piece.content is None:
                return False
            into[at - start : first - start] = 0
            part, target = piece.content[first - piece.start : last - piece.start], into[first - start : last - start]
            if isinstance(part, np.ndarray):
                target[:] = part
            else:
                torch.from_numpy(target).copy_(part)
            at = last
        into[at - start :] = 0
        return True


def content(local: Elements) -> Bytes | torch.Tensor:
    """The elements of a tensor or array as flat uint8. Shares the memory of contiguous ones."""
    if not isinstance(local, np.ndarray | np.generic):
        flat = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return flat.numpy() if flat.device.type == "cpu" else flat
    array: Bytes = np.ascontiguousarray(local).reshape(-1).view(np.uint8)
    return array
