"""Compares the names in ``into`` with those that a version holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from datetime import datetime, timezone

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.tensor_index import Finder, FoundRows
from ...storage.version import Version

logger = logging.getLogger(__name__)

_LISTED = 10  # names in an error; further ones are counted


class Incomplete(StateError):
    """The version is whole but lacks names that are asked for: it was thinned, or is of another state."""


def check_filled(version: Version, found: FoundRows, filled: Collection[str]) -> None:
    """``Incomplete`` if the version lacks a tensor that a damaged version may have filled."""
    if missing := sorted(set(filled) - found.chunks.keys()):
        why = f"{_thinned(version)}, and not" if version.record.thinned is not None else "does not hold"
        raise Incomplete(f"{why} {missing[0]!r}, which a damaged newer version holds", subject=f"version {version.id}")


def check_names(version: Version, finder: Finder, names: set[str], *, strict: bool, warn: bool) -> None:
    """With ``strict``, ``StateError`` for names that only one side has; else log what is not restored.

    The rest of a large manifest is read only if it may hold other names: each element is stored once, so a version whose bytes
    are all found holds no other tensor, except empty ones.
    """
    found = finder.found
    missing = sorted(names - found.chunks.keys() - found.values.keys())
    nbytes, raw = _nbytes(found), version.record.raw
    if not strict:
        if missing and version.record.thinned is not None:
            logged = version.id, _thinned(version), len(missing), missing[0]
            logger.warning("version %d %s: %d names of `into` are not restored, such as %s", *logged)
        elif nbytes < raw and warn:
            what = "strict=False: `into` has no place for %d of the %d bytes that version %d holds"
            logger.warning(what, raw - nbytes, raw, version.id)
        return
    saved = found.names | found.values.keys() if nbytes == raw and not missing else finder.names()
    unexpected = sorted(saved - names)
    if not (missing or unexpected):
        return
    parts = [
        f"{title}: {', '.join(listed[:_LISTED])}" + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")
        for title, listed in (("in `into` but not saved", missing), ("saved but not in `into`", unexpected))
        if listed
    ]
    if missing and version.record.thinned is not None:
        parts.append(f"it {_thinned(version)}")
        remedy = "restore a newer version to resume, or pass strict=False for what this version holds"
        raise Incomplete("; ".join(parts), subject=f"version {version.id}", remedy=remedy)
    raise StateError("; ".join(parts), subject=f"version {version.id}", remedy="make them match, or pass strict=False")


def _nbytes(found: FoundRows) -> int:
    """Bytes of all tensors that were found, whole."""
    first = [rows[0] for rows in found.chunks.values() if rows]
    return sum(math.prod(row.shape) * dtypes.dtype(row.dtype).itemsize for row in first)


def _thinned(version: Version) -> str:
    thinned = version.record.thinned
    assert thinned is not None
    when = datetime.fromtimestamp(thinned.at, timezone.utc)
    return f"was thinned at {when:%Y-%m-%d %H:%M} UTC and holds its {' and '.join(thinned.groups)} only"
