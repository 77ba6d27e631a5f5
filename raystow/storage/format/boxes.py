"""Boxes in the coordinates of a tensor: how they overlap, and whether they tile."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from ..coding.digest import stored_digest

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent, one number for each dimension: the elements ``[offset, offset + extent)``."""

PRIME = 2**255 - 19
"""Counts of ``Measure`` are numbers below it."""

_KNOWN = 1 << 16  # numbers of coordinates in memory


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None if it has no element."""
    if a == b:  # the common case
        return None if 0 in a[1] else a
    lows, sizes = list[int](), list[int]()
    for x, n, y, m in zip(*a, *b, strict=True):
        low, high = max(x, y), min(x + n, y + m)
        if high <= low:
            return None
        lows.append(low)
        sizes.append(high - low)
    return tuple(lows), tuple(sizes)


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index of ``inner`` in an array that has the elements of ``outer``."""
    return tuple(slice(x - y, x - y + n) for x, n, y in zip(*inner, outer[0], strict=True))


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """The row-major numbers of a box's first and last element in the tensor; of an empty box, of its place."""
    first = last = 0
    for offset, extent, size in zip(*box, shape, strict=True):
        first, last = first * size + offset, last * size + offset + max(extent, 1) - 1
    return first, last


def bounds(boxes: Sequence[Box]) -> Box:
    """The smallest box that contains all of these; there is at least one."""
    lows = tuple(map(min, zip(*(offset for offset, _ in boxes), strict=True)))
    highs = map(max, zip(*(map(operator.add, *box) for box in boxes), strict=True))
    return lows, tuple(high - low for low, high in zip(lows, highs, strict=True))


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """The boxes of the elements ``start`` to ``stop`` (exclusive) in row-major order: one after the other, fewer than twice the
    dimensions. None for an empty range."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,)) if shape else ((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, boxes_of_range(head, tail, shape[1:]))
    before = _in_row(first, boxes_of_range(head, row, shape[1:])) if head else []
    whole = first + bool(head)
    middle = [((whole, *(0 for _ in shape[1:])), (last - whole, *shape[1:]))] if whole < last else []
    return [*before, *middle, *_in_row(last, boxes_of_range(0, tail, shape[1:]))]


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [((row, *offset), (1, *extent)) for offset, extent in boxes]


class Measure:
    """Counts boxes so that only boxes that cover the same elements, each as often, count the same.

    Each axis gives each coordinate a random number, and an element counts as the product over the axes of the number after it
    minus its own. So a box counts as a product as well, of the numbers at its ends. Boxes that tile a whole count as much as it
    does; others do with a probability below 2^-240 (Schwartz, Zippel). The numbers are digests of ``seed``, which must follow
    from all boxes, so that nobody can choose boxes for them.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._numbers: dict[tuple[int, int], int] = {}  # by axis and coordinate

    def count(self, box: Box) -> int:
        """What a box counts. Counts add up modulo ``PRIME``."""
        product = 1
        for axis, (low, size) in enumerate(zip(*box, strict=True)):
            product = product * (self._number(axis, low + size) - self._number(axis, low)) % PRIME
        return product

    def _number(self, axis: int, coordinate: int) -> int:
        found = self._numbers.get((axis, coordinate))
        if found is None:
            if len(self._numbers) >= _KNOWN:
                self._numbers.clear()
            found = int.from_bytes(stored_digest(self._seed, b"%d %d" % (axis, coordinate)), "little")
            self._numbers[axis, coordinate] = found
        return found


def tile(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether the boxes cover each element of ``whole`` exactly once, and nothing else.

    The time is linear in the number of boxes; comparing pairs would take hours for a hostile manifest. See ``Measure``.
    """
    if _in_a_row(boxes, whole):
        return True
    measure = Measure(stored_digest(repr((whole, *boxes)).encode()))
    return sum(map(measure.count, boxes)) % PRIME == measure.count(whole)


def joined(boxes: Iterable[Box]) -> Iterator[Box]:
    """Boxes that cover the same elements, each as often: those that follow one another along the first axis are one."""
    at: Box | None = None
    for box in boxes:
        (offset, extent) = box
        if at is not None and offset and offset[0] == at[0][0] + at[1][0] and (offset[1:], extent[1:]) == (at[0][1:], at[1][1:]):
            at = at[0], (at[1][0] + extent[0], *extent[1:])
            continue
        if at is not None:
            yield at
        at = box
    if at is not None:
        yield at


def _in_a_row(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether each box begins where the one before ends, along the first axis: as raystow cuts tensors, and fast to check."""
    if not whole[0]:
        return False  # without an axis any number of boxes would pass
    (end, *_), (size, *_) = whole
    last, rest = end + size, (whole[0][1:], whole[1][1:])
    for offset, extent in boxes:
        if offset[0] != end or (offset[1:], extent[1:]) != rest:
            return False
        end += extent[0]
    return bool(boxes) and end == last
