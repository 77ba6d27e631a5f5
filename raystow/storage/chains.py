"""Which versions cannot be read without which, as the root tells: by the bases of their differences, and the bases of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .format.root import Entry


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
