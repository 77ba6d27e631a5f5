"""Boxes in the coordinates of a tensor: how they overlap, and whether they tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent, one number for each dimension: the elements ``[offset, offset + extent)``."""


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None if that is no element."""
    lows = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    highs = (min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return None if min(sizes, default=1) <= 0 else (lows, sizes)


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index of ``inner`` in an array that holds ``outer``."""
    return tuple(slice(x - y, x - y + n) for x, n, y in zip(*inner, outer[0], strict=True))


def tile(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether the boxes, all of which lie within ``whole``, cover each of its elements exactly once."""
    held = sum(math.prod(extent) for _, extent in boxes)
    solid = [box for box in boxes if math.prod(box[1])]
    return held == math.prod(whole[1]) and _disjoint(solid, len(whole[0]))


def _disjoint(boxes: Sequence[Box], dimensions: int) -> bool:
    """Whether no two boxes share an element.

    They are parted by planes that cut none of them, in each dimension, again and again; so it ends at once for whatever was
    made by cutting. What no plane parts (four boxes around a fifth) is compared pair by pair.
    """
    if len(boxes) < 2:
        return True
    for axis in range(dimensions):
        parts, end = list[list[Box]](), -1
        for box in sorted(boxes, key=lambda box: box[0][axis]):
            if box[0][axis] >= end:
                parts.append([])
            end = max(end, box[0][axis] + box[1][axis])
            parts[-1].append(box)
        if len(parts) > 1:
            return all(_disjoint(part, dimensions) for part in parts)
    return all(overlap(a, b) is None for a, b in itertools.combinations(boxes, 2))
