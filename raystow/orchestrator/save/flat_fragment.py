"""A range of a tensor's elements in row-major order, as ZeRO partitions tensors: stored in the tensor's own shape, as boxes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...storage.format.boxes import Box, boxes_of_range

if TYPE_CHECKING:
    import torch


class FragmentBox(NamedTuple):
    """One box of a fragment, and its elements in the shape of the box. ``shape``: of the tensor. ``first``: whether it contains
    the tensor's first element."""

    elements: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    first: bool


@dataclass(frozen=True, eq=False)
class FlatFragment:
    """What this rank alone has of a tensor of ``shape``: its ``elements`` from number ``start`` on, in a contiguous tensor of one
    dimension. Each element is in the fragment of one rank. A rank that has none gives an empty fragment."""

    elements: torch.Tensor
    shape: tuple[int, ...]
    start: int

    @functools.cached_property
    def boxes(self) -> tuple[FragmentBox, ...]:
        """The fragment as boxes: a single empty one if it has no elements, or none of a tensor without dimensions."""
        size, at, found = self.elements.numel(), 0, list[FragmentBox]()
        if not size and self.shape:
            box = (0,) * len(self.shape), (0, *self.shape[1:])
            return (FragmentBox(self.elements.view(box[1]), self.shape, box, False),)
        for box in boxes_of_range(self.start, self.start + size, self.shape):
            end = at + math.prod(box[1])
            found.append(FragmentBox(self.elements[at:end].view(box[1]), self.shape, box, not any(box[0])))
            at = end
        return tuple(found)
