"""What a training process stages: chunks, grouped by the device that codes them, and one order for each save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...storage.coding.kernels import Bytes
from ...storage.coding.rounded import Rounded
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format.root import Entry
from ..gpu.encode_request import DerivedPair, Source
from ..protocol.messages import Begin

logger = logging.getLogger(__name__)


CODECS = ("auto", "deflate", "zstd", "ans", "raw", "cpu")
"""Codecs of chunks on a GPU: nvCOMP's, none, or those of the node worker on its CPU."""

PROCESSES = ("training", "node")
"""Which process codes chunks on a GPU."""


class ChunkSource(Source, Protocol):
    """A chunk to stage: at most ``SLOT`` bytes, or ``DEVICE_CHUNK`` on a GPU."""

    @property
    def device(self) -> int | None:
        """The CUDA device that codes the chunk; None if the node worker does."""

    def copy(self, out: Bytes) -> None:
        """Copy the bytes into ``out``, row-major."""


class DerivedSource(DerivedPair, Protocol):
    """A chunk that is not staged if it follows from the chunk ``source``: see ``storage.coding.derived``."""

    @property
    def piece(self) -> ChunkSource:
        """The chunk itself."""

    @property
    def source(self) -> ChunkSource:
        """A chunk of the same group, on the same device."""


class SourceGroup(Protocol):
    """The chunks that one device codes. If nothing has changed since the last save, the objects are the same."""

    @property
    def pieces(self) -> Sequence[ChunkSource]:
        """Chunks that are always staged."""

    @property
    def followers(self) -> Sequence[DerivedSource]:
        """Chunks that are staged only if they do not follow from others."""


class CudaEvent(Protocol):
    """A ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait for it."""


class StagingPlan(Protocol):
    """The chunks of a save. Only the staging thread uses it: the first access computes it."""

    @property
    def parts(self) -> Mapping[int | None, SourceGroup]:
        """All chunks, by the CUDA device that codes them; None: the node worker does."""

    @property
    def values(self) -> tuple[tuple[str, str, str], ...]:
        """The plain values of the state: name, path, JSON text."""

    @property
    def coverage(self) -> tuple[int, int]:
        """``replicated`` and ``expected`` of ``messages.Begin``."""

    @property
    def owned_dtensors(self) -> tuple[str, ...]:
        """As in ``messages.Begin``."""

    @property
    def plain_tensors(self) -> tuple[str, ...]:
        """As in ``messages.Begin``; the same object as long as nothing changes."""

    @property
    def ready(self) -> Mapping[int, CudaEvent]:
        """For each CUDA device an event, after which its tensors may be read."""

    def find_derived(self) -> None:
        """Look for tensors that follow from others, for the next saves. Called once or more while tensors are staged."""

    def changed(self) -> str:
        """Return the name of a tensor that has changed since ``save``; "" if none has."""

    def not_derived(self, follower: object) -> None:
        """Note that a chunk does not follow from its source."""

    def rounded(self) -> Mapping[str, Rounded]:
        """Return what rounding has done to tensors, once all is staged. Raises ``SaveFailed`` if an error exceeds its bound."""

    def release(self) -> None:
        """Release the tensors."""


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
    plan: StagingPlan | None
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
