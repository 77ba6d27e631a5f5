"""Failed saves, counted: when training is to hear of them, and when it is not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..storage.arguments import integer
from ..storage.errors import RaystowError, SaveFailed
from ..storage.log import Log
from .arguments import one_of

logger = logging.getLogger(__name__)

REACTIONS = ("warn", "raise")
"""What a failed save may do to training: leave a line in the log, or raise at the next call as well."""


class Failures:
    """The failed saves of one rank: ``total``, and ``in_a_row`` since the last one that became durable.

    ``on_failure``: one of ``REACTIONS``. ``most``: so many failures in a row raise in any case; None: never. ``count`` is called
    for each. ``StateError`` if they make no sense.
    """

    def __init__(
        self, *, on_failure: str, most: int | None, count: Callable[[], None], log: logging.Logger | Log = logger
    ) -> None:
        one_of("on_failure", on_failure, REACTIONS)
        if most is not None:
            integer("max_failures", most, least=1, instead="None")
        self.total = self.in_a_row = 0
        self._on_failure, self._most, self._count, self._log = on_failure, most, count, log
        self._due: SaveFailed | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Failures(total={self.total}, in_a_row={self.in_a_row})"

    def succeeded(self) -> None:
        """A save is durable."""
        with self._lock:
            self.in_a_row, self._due = 0, None

    def failed(self, step: int, error: RaystowError) -> None:
        """A save has failed."""
        with self._lock:
            self.total += 1
            self.in_a_row += 1
            total, in_a_row = self.total, self.in_a_row
            if self._most is not None and in_a_row >= self._most:
                remedy = "mend the cause; max_failures=None lets training go on all the same"
                self._due = SaveFailed(f"{in_a_row} saves in a row have failed, the last one: {error}", remedy=remedy)
            elif self._on_failure == "raise":
                save = f"save of step {step}"
                self._due = error if isinstance(error, SaveFailed) else SaveFailed(str(error), subject=save)
        what = "the save of step %d failed (%d in a row, %d in all): %s"
        self._log.warning(what, step, in_a_row, total, error, extra={"step": step})
        self._count()

    def check(self) -> None:
        """Raise what training is to hear of, once: ``SaveFailed``."""
        with self._lock:
            due, self._due = self._due, None
        if due is not None:
            raise due
