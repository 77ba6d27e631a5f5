"""Checks of the arguments of saves and restores, in addition to ``storage.arguments``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..storage import addresses
from ..storage.arguments import integer, refused
from ..storage.errors import StateError
from ..storage.format import values
from ..storage.format.parts import is_name, part_number
from ..storage.limits import MAX_NAME, MAX_PARTS
from ..workers.cache.host_memory import memory_limit
from ..workers.shm.ring import SLOT

LONGEST = 1e9
"""Seconds that anything may be waited for, some 31 years: what the system can wait for is not much more."""


def address(uri: object) -> str:
    """Return the address of a repository as text. ``StateError`` if it looks like a mistyped one."""
    if isinstance(uri, os.PathLike):
        uri = os.fspath(uri)
    if not isinstance(uri, str):  # bytes may hold what must not be repeated
        raise StateError(f"uri is of type {type(uri).__name__}", remedy="give an address or a path, as text")
    addresses.parse(uri)
    return uri


def positive(name: str, value: object, *, most: float = float("inf"), instead: str = "") -> float:
    """Return a number above 0."""
    if type(value) is bool or not isinstance(value, int | float) or not 0 < value <= most:
        raise refused(name, value, "a number above 0" + (f", at most {most:,.0f}" if most < float("inf") else ""), instead)
    return value


def one_of(name: str, value: object, known: Sequence[str]) -> str:
    """A word that is among those known."""
    if not isinstance(value, str) or value not in known:
        raise refused(name, value, "one of " + ", ".join(known))
    return value


def memory_of_a_rank(value: object, *, name: str = "memory", least: int = 8 * SLOT, instead: str = "") -> int:
    """Bytes for staged and encoded data: at least eight slots, at most the memory of the machine or container."""
    nbytes, limit = integer(name, value, least=least, instead=instead), memory_limit()
    if nbytes > limit:
        raise refused(name, value, f"bytes, at most the {limit:,} that this machine or container has", instead)
    return nbytes


def part_names(parts: object) -> tuple[str, ...]:
    """The names of parts, of which no two are equal or have the same number."""
    if isinstance(parts, str) or not isinstance(parts, Sequence) or len(parts) > MAX_PARTS:
        raise refused("parts", parts, f"at most {MAX_PARTS} names", "()")
    for name in parts:
        if not isinstance(name, str) or not is_name(name):
            raise refused("a name of parts", name, "1 to 64 letters, digits, _ and -")
    if len(",".join(parts)) > MAX_NAME:
        raise refused("parts", parts, f"names of at most {MAX_NAME:,} characters in all")
    numbers = {part_number(name): name for name in parts}
    if len(numbers) < len(parts):
        twice = next(name for name in reversed(parts) if parts.count(name) > 1 or numbers[part_number(name)] != name)
        raise refused("a name of parts", twice, "another name: two parts have this one, or its number")
    return tuple(parts)


def metrics_of(metrics: object, what: str = "metrics") -> dict[str, object]:
    """The metrics or cut of a save: plain values by name. A tensor, array or numpy scalar becomes the number that it has."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise refused(what, metrics, "a dict of plain values by name", "None")
    found = {name: _number_in(value) for name, value in metrics.items()}
    for name, value in found.items():
        if not isinstance(name, str) or not values.is_plain(value):
            raise refused(f"{what}[{name!r:.80}]", value, "plain values by name")
        if len(name) > MAX_NAME or any("\ud800" <= c <= "\udfff" for c in name):
            raise refused(f"a name of {what}", name, f"at most {MAX_NAME:,} characters that UTF-8 can encode")
    return found


def _number_in(value: object) -> object:
    """The number in a tensor or array of one element, or in a numpy scalar; else the value itself."""
    if (item := getattr(value, "item", None)) is None:
        return value
    try:
        return item()
    except (RuntimeError, TypeError, ValueError):  # it has several elements
        return value
