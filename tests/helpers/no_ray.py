"""Connections to no cluster, for tests whose actors are plain objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.replaced_parts import replace_parts
from raystow.orchestrator import ray_cluster
from raystow.workers.ray_connection import RayConnection


class Unchecked(RayConnection):
    """A connection that never ends."""

    def check(self) -> None: ...


class NoRay(Unchecked):
    """What ``send`` returns is the answer."""

    def call(self, send: Callable[[], Any], timeout: float, who: str) -> Any:
        return send()


def without_ray(node: str) -> Callable[[], RayConnection]:
    """Return a replacement of ``RayConnection.here`` for a process of a node."""
    connection = NoRay("nowhere", "none", "1", node)
    return lambda: connection


def connect_without_ray(patch: pytest.MonkeyPatch, node: str) -> None:
    """Make this process one of a node, connected to no cluster."""
    replace_parts(patch, [(RayConnection, "here", without_ray(node))])


def refuse_cluster(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let every connection to a cluster fail with an error."""

    def connect(address: str = "auto") -> None:
        raise error

    replace_parts(patch, [(ray_cluster, "connect", connect)])
