"""What a training process stages: one order for each save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ...state.planner import SavePlan
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format.root import Entry
from ..protocol.messages import Begin

logger = logging.getLogger(__name__)


CODECS = ("auto", "deflate", "zstd", "ans", "raw", "cpu")
"""Codecs of chunks on a GPU: nvCOMP's, none, or those of the node worker on its CPU."""

PROCESSES = ("training", "node")
"""Which process codes chunks on a GPU."""


@dataclass
class SaveOrder:
    """One save to stage.

    Args:
        begin: What to announce; the staging thread fills in what it learns from the plan.
        on_read: Called when all tensors have been read. All callbacks run on threads of the staging.
        on_end: Called with the version's entry or the error.
        on_staged: Called when the node worker has said that it has all of the save, or that the save is a version.
        urgent: Set while the training waits for the staging.
        stall: Returns for how many seconds the training has waited; None if unknown.
        failed: Whether the save has failed.
        changed: The name of a tensor that the training changed before it was staged; "" if none has. None before it is known.
        complete: Whether the node worker may have all that it needs; before that the save cannot become a version.
        attempt: The id and the name of its attempt, once known.
    """

    begin: Begin
    plan: SavePlan | None
    on_read: Callable[[], None]
    on_end: Callable[[Entry | RaystowError], None]
    on_staged: Callable[[], None] = lambda: None
    on_warning: Callable[[str], None] = logger.warning
    urgent: threading.Event = field(default_factory=threading.Event)
    stall: Callable[[], float | None] = lambda: None
    failed: bool = False
    changed: str | None = None
    complete: bool = False
    attempt: tuple[int, str] | None = None

    @property
    def subject(self) -> str:
        """Names the save in errors."""
        return f"save of step {self.begin.step}"

    def all_read(self, grace: float = 0.0) -> None:
        """Look whether a tensor has changed, and let the training change them from now on. Further calls do nothing.

        torch counts an operation in place when it has ended, so one that runs now shows only later: ``grace`` seconds, unless the
        training waits, and so runs none.
        """
        if self.changed is None and self.plan is not None:
            self.urgent.wait(grace)
            self.changed = self.plan.changed()
            self.on_read()

    def check(self) -> None:
        """Raise ``SaveFailed`` if the save has failed meanwhile."""
        if self.failed:
            raise SaveFailed("it has failed already", subject=self.subject)
