"""What a training process stages: one order for each save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ...state.planner import SavePlan
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format.root import Entry
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ..protocol.messages import RankSaveRequest
from .progress import SaveProgress

CODECS = ("auto", "deflate", "zstd", "ans", "raw", "cpu")
"""Codecs of chunks on a GPU: nvCOMP's, none, or those of the node worker on its CPU."""

HOSTS = ("auto", "cpu")
"""What encodes tensors in host memory."""

PROCESSES = ("training", "node")
"""Which process codes chunks on a GPU."""


@dataclass
class SaveOrder:
    """One save to stage.

    Args:
        request: What ``save`` was called with.
        progress: What the staging reports, and whether the training waits for it.
        on_end: Called, on a thread of the staging, with the version's entry or the error.
        failed: Whether the save has failed.
        changed: The name of a tensor that the training changed before it was staged; "" if none has. None before it is known.
        complete: Whether the node worker may have all that it needs; before that the save cannot become a version.
    """

    request: RankSaveRequest
    plan: SavePlan | None
    progress: SaveProgress
    on_end: Callable[[Entry | RaystowError], None]
    failed: bool = False
    changed: str | None = None
    complete: bool = False
    _looking: threading.Lock = field(default_factory=threading.Lock, init=False)
    _settled: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.plan is not None:
            self.progress.note_planned(self.request.rank, self.request.trace, self.plan.made)

    @property
    def subject(self) -> str:
        """Names the save in errors."""
        return self.progress.subject

    def all_read(self, grace: float = 0.0) -> None:
        """Look whether a tensor has changed, and let the training change them from now on. Further calls do nothing but wait for
        the first one.

        torch counts an operation in place when it has ended, so one that runs now shows only later: ``grace`` seconds, unless the
        training waits, and so runs none.
        """
        with self._looking:
            plan = self.plan
            if self.changed is None and plan is not None:
                self.progress.urgent.wait(max(grace, self._settled - SYSTEM.monotonic()))
                self.changed = plan.changed()
                self.progress.read.set()

    def look_later(self, grace: float) -> None:
        """Do as ``all_read``, in the background: the staging goes on meanwhile."""
        self._settled = SYSTEM.monotonic() + grace
        background.start("raystow-look", self.all_read)

    def check(self) -> None:
        """Raise ``SaveFailed`` if the save has failed meanwhile."""
        if self.failed:
            raise SaveFailed("it has failed already", subject=self.subject)
