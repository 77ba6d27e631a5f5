"""The name of a tensor that each rank stores for itself: the last key of its path is ``[rank 3]``."""

from __future__ import annotations

import re

_PART = re.compile(r"\[rank (0|[1-9][0-9]{0,8})\]")


def rank_part(rank: int) -> str:
    """The last key of the path of a tensor of one rank."""
    return f"[rank {rank}]"


def rank_of(part: object) -> int | None:
    """The rank that the last key of a path names; None if it names none."""
    match = _PART.fullmatch(part) if isinstance(part, str) else None
    return None if match is None else int(match[1])
