"""Which version follows which, and rollbacks.

Each version continues the one that was newest when it was committed: that one, the one before it, and so on are its history. The
live versions are the history of the newest; a rollback chooses the history of another version. Pure: changes no store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..format.root import RolledBack, Root


def predecessors(root: Root) -> dict[int, int]:
    """The id of the version before each listed one in its history; 0 for none."""
    live = [entry.id for entry in root.versions]
    return dict(zip(live, [0, *live], strict=False)) | {one.entry.id: one.after for one in root.rolled_back}


def remaining(before: Mapping[int, int], id: int, gone: Collection[int]) -> int:
    """The newest of ``id`` and the versions before it in its history that is not among ``gone``; 0 for none."""
    while id in gone:
        id = before.get(id, 0)
    return id


def roll_back(root: Root, id: int, at: float) -> Root:
    """The root after a rollback to version ``id``, which is listed: its history is live, and nothing else, no segment either.

    ``at``: seconds since 1970.
    """
    before, since = predecessors(root), {one.entry.id: one.at for one in root.rolled_back}
    live = set[int]()
    while id:
        live.add(id)
        id = before.get(id, 0)
    return replace(
        root,
        rollbacks=root.rollbacks + 1,
        versions=tuple(entry for entry in root.listed if entry.id in live),
        rolled_back=tuple(
            RolledBack(entry, before[entry.id], since.get(entry.id, at)) for entry in root.listed if entry.id not in live
        ),
        verified=root.verified if root.verified in live else 0,
        segments=(),
    )


def without(root: Root, gone: Collection[int]) -> Root:
    """The root without some versions. Those after them follow the ones before them."""
    before = predecessors(root)
    return replace(
        root,
        versions=tuple(entry for entry in root.versions if entry.id not in gone),
        rolled_back=tuple(
            replace(one, after=remaining(before, one.after, gone)) for one in root.rolled_back if one.entry.id not in gone
        ),
    )
