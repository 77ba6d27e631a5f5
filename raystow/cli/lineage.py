"""Which version of a repository was resumed from which: runs, resumes, rollbacks and forks, and how to draw them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..storage.errors import Damaged, NotFound, Unsupported, Untrusted
from ..storage.format.version_record import VersionRecord
from ..storage.root.history import predecessors
from ..storage.versions.version import Version
from .target import Target

_READERS = 16  # threads; records are small, so that latency dominates


@dataclass(frozen=True)
class LineageVersion:
    """A version in the lineage.

    Attributes:
        version: The version.
        parent: The id of the version whose state it continues, listed or not; None for a fresh start.
        begins: Whether it is the first listed one of a run, or of a run after a restore.
        record: What is known of it; None if it cannot be read.
    """

    version: Version
    parent: int | None
    begins: bool
    record: VersionRecord | None

    @property
    def origin(self) -> Mapping[str, str]:
        """The version's provenance."""
        return self.record.provenance if self.record is not None else {}


def lineage(target: Target) -> list[LineageVersion]:
    """Return the listed versions, oldest first. Reads the record of each."""
    before, found = predecessors(target.root), list[LineageVersion]()
    runs = dict[str, tuple[int, str]]()  # the newest version of each so far, and the version that it had restored then
    versions = target.listed()
    with ThreadPoolExecutor(_READERS, "raystow-log") as pool:
        for version, record in zip(versions, pool.map(_record, versions), strict=True):
            origin = record.provenance if record is not None else {}
            name, resumed = origin.get("run", ""), origin.get("resumed", "")
            if not name:  # by an older raystow, or without a record
                found.append(LineageVersion(version, before.get(version.id) or None, False, record))
                continue
            last = runs.get(name)
            begins = last is None or last[1] != resumed
            parent = (int(resumed) if resumed.isdecimal() else None) if last is None or begins else last[0]
            runs[name] = (version.id, resumed)
            found.append(LineageVersion(version, parent, begins, record))
    return found


def graph(versions: Sequence[LineageVersion]) -> Iterator[tuple[str, LineageVersion | None]]:
    """Draw the lineage, newest version first: yield the lines of columns, each with the version that it marks with ``*``.

    A column leads from a version to its parent. Where several versions have one parent, their columns join above it.
    """
    lanes, listed = list[int](), {one.version.id for one in versions}  # the parent that each column leads to; 0: unused
    for one in reversed(versions):
        id = one.version.id
        if id in lanes:
            place = lanes.index(id)
            others = [at for at, lane in enumerate(lanes) if lane == id and at != place]
            if others:
                yield _joined(lanes, place, others), None
            lanes = [0 if at in others else lane for at, lane in enumerate(lanes)]
        else:
            place = lanes.index(0) if 0 in lanes else len(lanes)
            lanes[place : place + 1] = [id]
        yield " ".join("*" if at == place else "|" if lane else " " for at, lane in enumerate(lanes)).rstrip(), one
        lanes[place] = one.parent if one.parent in listed else 0
        while lanes and not lanes[-1]:
            lanes.pop()


def _joined(lanes: Sequence[int], place: int, others: Sequence[int]) -> str:
    """The line on which columns join that of ``place``."""
    cells = list[str]()
    for at, lane in enumerate(lanes):
        between = place < at < others[-1]
        cells.append("/" if at in others else "|" if lane else "-" if between else " ")
        cells.append("-" if place <= at < others[-1] else " ")
    return "".join(cells).rstrip()


def _record(version: Version) -> VersionRecord | None:
    try:
        return version.record
    except (Damaged, NotFound, Unsupported, Untrusted):
        return None
