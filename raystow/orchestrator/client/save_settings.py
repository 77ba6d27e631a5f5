"""What all saves of a ``Checkpointer`` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from ...state.lossy.profiles import Lossy
from ...state.planner import Planner
from ...state.replica_groups import Compared
from ...storage.format import values
from ...storage.retention.policy import Policy
from ...storage.runtime import spans
from ...storage.versions.version import Version
from ...workers.protocol.messages import ExportOrder, JoinRun, OnDifference, OnFenced, RankSaveRequest, RequestExport
from ..argument_checks import one_of
from ..coordinator.delta_schedule import Delta
from .provenance import Provenance

Values: TypeAlias = Mapping[str, object]
"""Plain values by name."""


@dataclass(frozen=True)
class SaveSettings:
    """See ``Checkpointer`` and ``RankSaveRequest``."""

    timeout: float
    retention: Policy | None
    lossy: Lossy
    delta: Delta
    on_fenced: OnFenced
    on_difference: str
    compare_replicas: str
    provenance: Provenance
    export: ExportOrder | None
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("on_fenced", self.on_fenced, ("raise", "takeover"))
        one_of("on_difference", self.on_difference, ("warn", "raise"))
        one_of("compare_replicas", self.compare_replicas, ("all", "small", "off"))

    def export_request(self, member: JoinRun) -> RequestExport | None:
        """Return what rank 0 asks for apart from its saves; None if no versions are exported."""
        if self.export is None:
            return None
        return RequestExport(member.rank, member.world_size, member.incarnation, self.export, self.retention)

    def planner(self) -> Planner:
        """Make the planner of a rank."""
        return Planner(self.lossy, compared=cast(Compared, self.compare_replicas))

    def request(
        self,
        member: JoinRun,
        resumed: Version | None,
        past: str,
        save: int,
        step: int,
        metrics: Mapping[str, object],
        cut: Mapping[str, object],
    ) -> RankSaveRequest:
        """Return what is known of a save when it is called. ``resumed``: the version that the run was resumed from. ``past``:
        see ``RankSaveRequest``."""
        return RankSaveRequest(
            rank=member.rank,
            world_size=member.world_size,
            incarnation=member.incarnation,
            save=save,
            step=step,
            timeout=self.timeout,
            metrics={name: values.dumps(value) for name, value in metrics.items()},
            lossy=self.lossy.texts(),
            retention=self.retention,
            delta=self.delta,
            on_fenced=self.on_fenced,
            on_difference=cast(OnDifference, self.on_difference),
            provenance=self.provenance.texts(resumed),
            notes=self.provenance.notes,
            export=self.export,
            trace=spans.here(),
            parts=",".join(self.parts),
            cut={name: values.dumps(value) for name, value in cut.items()},
            past=past,
        )
