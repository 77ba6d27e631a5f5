"""A connection to no cluster, for tests whose actors are plain objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raystow.workers.ray_connection import RayConnection


class NoRay(RayConnection):
    """What ``send`` returns is the answer."""

    def check(self) -> None: ...

    def call(self, send: Callable[[], Any], timeout: float, who: str) -> Any:
        return send()


def without_ray(node: str) -> Callable[[], RayConnection]:
    """Return a replacement of ``RayConnection.here`` for a process of a node."""
    connection = NoRay("nowhere", "none", "1", node)
    return lambda: connection
