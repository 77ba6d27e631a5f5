"""The part of ``raystow prune`` that thins: version by version, past those that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...storage.errors import Damaged, NotFound, RaystowError, Unsupported
from .progress import byte_bar

if TYPE_CHECKING:
    from ...storage.format.root import Entry
    from ...storage.retention.plan import RetentionPlan
    from ...storage.retention.thinning import Thinning

_OF_ONE = (Damaged, NotFound, Unsupported)
"""Errors of one version: those after it may be whole."""


class Thin:
    """What a plan thins. ``due``: the versions of which anything would go, newest first. ``errors``: of versions that cannot be
    thinned, ``failed`` of them found so by ``execute``; they stay as they are."""

    def __init__(self, plan: RetentionPlan) -> None:
        self.due: list[Thinning] = []
        self.errors: list[RaystowError] = []
        self.failed = 0
        for entry in plan.thinned:
            try:
                thinning = plan.thinning(entry)
            except _OF_ONE as error:
                self.errors.append(error)
            else:
                self.due += [thinning] if thinning.needed else []

    @property
    def sizes(self) -> dict[int, int]:
        """By id, about how many stored bytes each will have."""
        return {thinning.version.id: thinning.rewriting.stored for thinning in self.due}

    def execute(self, *, quiet: bool) -> list[Entry]:
        """Thin them; the root's new entries."""
        done: list[Entry] = []
        with byte_bar("thinning", sum(thinning.rewriting.read for thinning in self.due), quiet=quiet) as advance:
            for thinning in self.due:
                try:
                    entry = thinning.execute(progress=advance)
                except _OF_ONE as error:
                    self.errors.append(error)
                    self.failed += 1
                else:
                    done += [entry] if entry is not None else []
        return done
