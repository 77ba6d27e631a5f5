"""What a repository and a version may hold at most, estimated before anything is stored. A commit checks the exact bounds, which
are those of ``limits``."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SaveFailed
from ..limits import MAX_ITEMS, MAX_RECORD, MAX_ROOT
from .root import Root

_NODE, _NODE_ITEMS = 320, 24  # bytes and elements of a fragment's line in a record, without its ranks
_RANK = 11  # bytes of a rank there
_VERSION, _SEGMENT, _NOTE = 256, 320, 96  # bytes in a root: of a version, of a segment, and of a pin or a dropped attempt

RANKS = MAX_ITEMS // (_NODE_ITEMS // 8 + 1)
"""Ranks of a version, 8 on a node."""

VERSIONS = MAX_ROOT // _VERSION
"""Versions of a repository."""


def check_record(nodes: int, ranks: int, texts: Iterable[str]) -> None:
    """Raise ``SaveFailed`` if a version of so many nodes and ranks would have no record. ``texts``: of its metrics and rules."""
    size = nodes * _NODE + ranks * _RANK + sum(map(len, texts))
    if size > MAX_RECORD or nodes * _NODE_ITEMS + ranks > MAX_ITEMS:
        what = f"the record of {ranks:,} ranks on {nodes:,} nodes would take about {size:,} bytes, more than readers take"
        raise SaveFailed(what, remedy=f"save smaller metrics, or fewer than {RANKS:,} ranks, with more of them on a node")


def check_root(root: Root) -> None:
    """Raise ``SaveFailed`` if the root has no space for another version."""
    notes = len(root.pins) + len(root.dropped) + len(root.rewrites)
    if len(root.listed) * _VERSION + len(root.segments) * _SEGMENT + notes * _NOTE > MAX_ROOT - _VERSION:
        what = f"the repository has {len(root.listed):,} versions, as many as its root can list"
        raise SaveFailed(what, subject="root.json", remedy="remove versions: give `retention=`, or run `raystow prune`")
