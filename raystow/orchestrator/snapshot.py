"""A running cluster at one moment, as somebody sees it who takes no part: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..workers.status import NodeStatus
from .overview import Overview


@dataclass(frozen=True)
class Snapshot:
    """``at``: seconds since 1970. ``coordinators``: by the name of the actor; ``nodes``: by Ray's id of the node. None for one
    that did not answer in time. ``trouble``: why nobody at all could be asked; then the rest is empty."""

    at: float
    coordinators: Mapping[str, Overview | None]
    nodes: Mapping[str, NodeStatus | None]
    trouble: str = ""
