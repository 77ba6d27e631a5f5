"""Ranks in texts for people, as spans."""

from __future__ import annotations

from collections.abc import Iterable

LISTED = 8
"""Ranks, or spans of ranks, that a text lists."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0-2, 4-7``."""
    spans = list[tuple[int, int]]()
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:LISTED])
    more = sum(last - first + 1 for first, last in spans[LISTED:])
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if one else 's'} {ranges}{f' and {more} more' if more else ''}"
