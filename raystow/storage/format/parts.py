"""Named parts of a version: what actors outside the ranks have saved.

A part is a member of a save as a rank is. Its number follows from its name, so it is the same whatever the world size. The names
of its tensors and values begin with a key of its own. Below that key it is rank 0 of one rank.
"""

from __future__ import annotations

import functools
import re

from ..coding.digest import stored_digest

FIRST_PART = 500_000_000
"""The least member number of a part. Those of ranks are below."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KNOWN = 1 << 16  # names
_names = dict[int, str]()  # by the numbers that this process has computed, for texts
_KEY = re.compile(r"\[part ([A-Za-z0-9_-]{1,64})\]")


def is_name(name: str) -> bool:
    """Whether a part may have this name: 1 to 64 letters, digits, ``_`` and ``-`` of ASCII."""
    return _NAME.fullmatch(name) is not None


def names_in(declared: str) -> tuple[str, ...]:
    """The names of parts in a text that joins them by commas."""
    return tuple(declared.split(",")) if declared else ()


@functools.lru_cache(1 << 12)  # the coordinator asks for those of each save
def part_number(name: str) -> int:
    """The member number of a part: from ``FIRST_PART`` to ``2 * FIRST_PART - 1``."""
    number = FIRST_PART + int.from_bytes(stored_digest(name.encode())[:8], "little") % FIRST_PART
    if len(_names) == _KNOWN:
        _names.clear()
        part_number.cache_clear()  # so that those still in use are known again
    _names[number] = name
    return number


def name_of(member: int) -> str:
    """The name of a part whose number this process has computed; "" if it has not."""
    return _names.get(member, "")


def is_part(member: int) -> bool:
    """Whether a member number is that of a part."""
    return member >= FIRST_PART


def part_key(name: str) -> str:
    """The first key of the paths of a part."""
    return f"[part {name}]"


def part_of_key(key: object) -> str:
    """The part whose key this is; "" for the key of no part."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    return match[1] if match is not None else ""


def part_of(name: str) -> str:
    """The part that has a tensor or value of this name; "" if the ranks have it."""
    return part_of_key(name.partition(".")[0]) if name.startswith("[part ") else ""
