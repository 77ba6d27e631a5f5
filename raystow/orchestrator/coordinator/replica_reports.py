"""Reports what ranks hold differently: to the user of rank 0, in a metric, and in the version's record."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from ...storage.errors import ReplicasDiffer
from ...storage.format.replica_difference import CAUSES, TENSOR, ReplicaDifference
from ...storage.runtime.metrics import DIFFERENCES, record
from .attempt import Attempt

_LISTED, _NAMES = 3, 2000  # differences, and characters of the names of the others
REMEDY = 'look at docs/replicas.md; on_difference="warn" saves nevertheless'


class ReplicaReports:
    """The reports of one run to the repository at ``uri``. What may differ by design, and plain values, are
    reported once, under names that differ in numbers only, too."""

    def __init__(self, uri: str) -> None:
        self._uri, self._named = uri, set[str]()

    def report(self, attempt: Attempt) -> ReplicasDiffer | None:
        """Report the differences of an attempt, which its record will have. Returns why it fails, if it does."""
        attempt.differences = found = attempt.comparison.differences()
        tensors = [one for one in found if one.kind == TENSOR]
        for kind in {one.kind for one in found}:
            record(DIFFERENCES, sum(one.kind == kind for one in found), repository=self._uri, kind=kind)
        new = [one for one in found if one.kind != TENSOR and _without_numbers(one.name) not in self._named]
        self._named |= {_without_numbers(one.name) for one in new}
        if not found and attempt.comparison.differs:
            attempt.warn("ranks hold other bits of the same tensors, but their nodes have not said which", 0)
        if tensors and attempt.raises:
            return ReplicasDiffer(f"{_listed(tensors)}; {CAUSES}", subject=attempt.subject, remedy=REMEDY)
        if tensors:
            attempt.warn(f"{_listed(tensors)}; {CAUSES}", 0)
        if new:
            by_design = "reported once, since buffers and plain values may differ by design"
            attempt.warn(f"{_listed(new)} ({by_design})", 0)
        return None


def _without_numbers(name: str) -> str:
    """The same for all items of a list that grows, and for all layers."""
    return re.sub(r"\d+", "#", name)


def _listed(found: Sequence[ReplicaDifference]) -> str:
    names = textwrap.shorten(", ".join(one.name for one in found[_LISTED:]), _NAMES, placeholder=" ...")
    more = f"; and {len(found) - _LISTED} more: {names}" if len(found) > _LISTED else ""
    return "; ".join(map(str, found[:_LISTED])) + more
