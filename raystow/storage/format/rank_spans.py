"""Ranks and parts in texts for people; ranks as spans: those that saved one value are often all of tens of thousands."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .parts import is_part, name_of

LISTED = 8
"""Ranks, or spans of ranks, that a text lists."""


@dataclass
class RankSet:
    """A set of ranks. ``ends``: where its spans begin and end (exclusive), in turn, ascending."""

    ends: list[int] = field(default_factory=list)

    def add(self, ranks: Iterable[int]) -> None:
        """Add ranks."""
        for rank in ranks:
            first, last = bisect_left(self.ends, rank), bisect_right(self.ends, rank + 1)
            # A place with an even number is outside of the spans.
            self.ends[first:last] = [rank] * (first % 2 == 0) + [rank + 1] * (last % 2 == 0)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.spans:
            yield from range(first, end)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first rank of each span, and the one after its last, ascending."""
        return list(zip(self.ends[::2], self.ends[1::2], strict=True))


def ranks_text(members: Iterable[int]) -> str:
    """Name ranks and parts: ``rank 3``, ``ranks 0-2, 4-7``, ``rank 0 and part 'buffer'``."""
    numbers, found = sorted(members), RankSet()
    parts = [repr(name_of(number) or number) for number in numbers if is_part(number)]
    found.add(numbers[: len(numbers) - len(parts)])
    spans = [(first, end - 1) for first, end in found.spans]
    ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:LISTED])
    more = sum(last - first + 1 for first, last in spans[LISTED:])
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    texts = [f"rank{'' if one else 's'} {ranges}{f' and {more} more' if more else ''}"] if spans or not parts else []
    if parts:
        texts.append(f"part{'s' * (len(parts) > 1)} {', '.join(parts[:LISTED])}")
        texts[-1] += f" and {len(parts) - LISTED} more" if len(parts) > LISTED else ""
    return " and ".join(texts)


def member_text(member: int) -> str:
    """Name a rank or part."""
    return ranks_text((member,))
