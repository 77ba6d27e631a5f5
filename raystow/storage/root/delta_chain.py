"""Which versions need which, by the bases in the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..format.root import Entry


def needed(entries: Sequence[Entry], ids: Iterable[int]) -> dict[int, list[int]]:
    """The versions that ``ids`` need, directly or not, each with its users. ``entries``: of the root, ids ascending."""
    held = set(ids)
    users: dict[int, list[int]] = {}
    for entry in reversed(entries):  # bases are older than their users
        if entry.id in held or entry.id in users:
            for base in entry.bases:
                users.setdefault(base, []).append(entry.id)
    return {base: found[::-1] for base, found in users.items()}


def dependents(entries: Sequence[Entry], id: int) -> list[int]:
    """The versions that need version ``id``, directly or not, ascending."""
    lost = {id}
    for entry in entries:
        if not lost.isdisjoint(entry.bases):
            lost.add(entry.id)
    return sorted(lost - {id})


def depths(entries: Sequence[Entry]) -> dict[int, int]:
    """The number of versions that each is made of, by id: 1 if it is whole, else one more than its deepest base."""
    found: dict[int, int] = {}
    for entry in entries:
        found[entry.id] = 1 + max((found.get(base, 0) for base in entry.bases), default=0)
    return found


def base_chain(entries: Mapping[int, Entry], entry: Entry) -> list[Entry]:
    """``entry``, its base, that one's base, and so on to a whole one. ``entries``: by id."""
    found = [entry]
    while (base := entries.get(min(found[-1].bases, default=0))) is not None and base.id < found[-1].id:
        found.append(base)
    return found
