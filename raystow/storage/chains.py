"""Which versions cannot be read without which, as the root tells: by the bases of their differences, and the bases of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .format.root import Entry
from .limits import MAX_CHAIN


def needed(entries: Sequence[Entry], ids: Iterable[int]) -> dict[int, list[int]]:
    """What the versions ``ids`` are differences to, directly or not: each id with those that are differences to it, among them
    all. ``entries``: those of the root, whose ids ascend."""
    held = set(ids)
    users: dict[int, list[int]] = {}
    for entry in reversed(entries):  # a base is older: whoever needs it was seen before
        if entry.id in held or entry.id in users:
            for base in entry.bases:
                users.setdefault(base, []).insert(0, entry.id)
    return users


def dependents(entries: Sequence[Entry], id: int) -> list[int]:
    """The versions that are lost with version ``id``, ascending."""
    lost = {id}
    for entry in entries:
        if not lost.isdisjoint(entry.bases):
            lost.add(entry.id)
    return sorted(lost - {id})


def depths(entries: Sequence[Entry]) -> dict[int, int]:
    """How many versions each is made of, by its id: 1 if it is whole, else one more than the deepest of its bases."""
    found: dict[int, int] = {}
    for entry in entries:
        found[entry.id] = 1 + max((found.get(base, 0) for base in entry.bases), default=0)
    return found


def sound(entries: Sequence[Entry], entry: Entry) -> bool:
    """Whether ``entry``, one of ``entries``, and all that needs it can be read: its bases are there, and no chain is too long."""
    ids, found = {one.id for one in entries}, depths(entries)
    return ids.issuperset(entry.bases) and all(found[id] <= MAX_CHAIN for id in (entry.id, *dependents(entries, entry.id)))


def line(entries: Mapping[int, Entry], entry: Entry) -> list[Entry]:
    """``entry``, the version that it is a difference to, what that is one to, and so on, to a whole one. ``entries``: by id."""
    found = [entry]
    while (base := entries.get(min(found[-1].bases, default=0))) is not None and base.id < found[-1].id:
        found.append(base)
    return found
