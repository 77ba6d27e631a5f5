"""Notices about the state that a training saves: what would make its next restart fail, or resume otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ...state.omissions import SavedState
from .restores import Restores

logger = logging.getLogger(__name__)


class StateNotices:
    """Examines the first save after a step, and compares the plain values of the first two of different steps, on rank 0. Later
    saves cost nothing. Never raises: a state that cannot be examined is saved all the same. ``restores``: of this rank."""

    def __init__(self, rank: int, restores: Restores) -> None:
        self._restores = restores
        self._looked = self._compared = rank != 0
        self._before: tuple[int, Mapping[str, str]] | None = None

    def report(self, warn: Callable[[str], None], saved: SavedState, step: int) -> None:
        """Call ``warn`` with each notice about a save."""
        if self._looked and self._compared:
            return
        try:
            for notice in self._notices(saved, step):
                warn(notice)
        except Exception:  # of objects of other libraries
            self._looked = self._compared = True
            logger.debug("the state of step %d could not be examined", step, exc_info=True)

    def _notices(self, saved: SavedState, step: int) -> Iterator[str]:
        if not self._compared:
            yield from self._unchanged(saved, step)
        if not self._looked and step > 0:  # before the first step, an optimizer has no state
            self._looked = True
            fresh, self._restores.fresh = self._restores.fresh, None
            if fresh is not None and (difference := fresh.difference(saved.plan)):
                yield difference
            yield from saved.omissions()

    def _unchanged(self, saved: SavedState, step: int) -> Iterator[str]:
        before, own = self._before, saved.own_values()
        if before is None or before[0] == step:
            self._before = step, own
            return
        self._compared, self._before = True, None
        if own == before[1] and (counters := saved.counters()):
            what = f"no plain value has changed since the save of step {before[0]}: {saved.shown(counters)}"
            yield f"{what}; set it before each save"
