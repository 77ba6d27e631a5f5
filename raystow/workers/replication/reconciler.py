"""The common parts of the threads that keep copies on other nodes: the choice of partners, and the loop."""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections.abc import Iterable, Mapping

from ...storage.errors import RaystowError
from ...storage.runtime.clock import Clock
from ..node_peers import NodePeers
from .partners import partners

logger = logging.getLogger(__name__)

LOOK = 3.0
"""Seconds from one comparison with the other nodes to the next."""

_CENSUS = 30.0  # seconds between lists of all nodes while there are enough partners: thousands of nodes ask the head node
_SHUN = 30.0  # seconds for which a node that did not answer is no partner


class PartnerNodes:
    """The nodes that may keep copies for this one, whose name is ``node``. For one thread."""

    def __init__(self, node: str, cluster: NodePeers, clock: Clock) -> None:
        self._node, self._cluster, self._clock = node, cluster, clock
        self._chosen: dict[int, tuple[str, ...]] = {}  # number of replicas -> partners
        self._shunned: dict[str, float] = {}  # until when
        self._counted = -math.inf
        self.zones: Mapping[str, str] = {}

    def refresh(self, degrees: Iterable[int]) -> None:
        """List the nodes again if it is time to: sooner if there are fewer partners than one of these numbers of replicas."""
        now = self._clock.monotonic()
        if any(until <= now for until in self._shunned.values()):
            self._shunned = {node: until for node, until in self._shunned.items() if until > now}
            self._chosen.clear()
        pause = LOOK if any(len(self.of(degree)) < degree for degree in degrees) else _CENSUS
        if now - self._counted < pause:
            return
        self._counted = now
        try:
            self.zones = self._cluster.nodes()
        except RaystowError as error:
            logger.warning("it is not known which nodes there are: %s", error)
        self._chosen.clear()

    def of(self, replicas: int) -> tuple[str, ...]:
        """The nodes that keep ``replicas`` copies of this node's objects; fewer if there are not enough."""
        if replicas not in self._chosen:
            able = {node: zone for node, zone in self.zones.items() if node not in self._shunned}
            self._chosen[replicas] = partners(able, replicas).get(self._node, ())
        return self._chosen[replicas]

    def answers(self, node: str) -> bool:
        """Whether a node may be asked: it has answered the last time, or that was long ago."""
        return node not in self._shunned

    def shun(self, node: str, error: RaystowError) -> None:
        """Choose other partners for a while, in place of a node that did not answer."""
        logger.warning("no copies go to a node that does not answer, for %.0f s: %s", _SHUN, error)
        self._shunned[node] = self._clock.monotonic() + _SHUN
        self._counted = -math.inf
        self._chosen.clear()


class Reconciler(abc.ABC):
    """Sends what other nodes lack, step by step. ``step`` and ``run`` are called by one thread, the others by any."""

    def __init__(self) -> None:
        self._woken, self._closed = threading.Event(), False

    @abc.abstractmethod
    def step(self) -> float:
        """Do the next thing; return the seconds until there is more to do, unless ``wake`` is called before."""

    def wake(self) -> None:
        """Let ``run`` call ``step`` at once, since something has changed."""
        self._woken.set()

    def close(self) -> None:
        """Let ``run`` return."""
        self._closed = True
        self._woken.set()

    def run(self) -> bool:
        """Call ``step``, and wait until there may be something to do again. Returns False after ``close``."""
        pause = LOOK
        try:
            pause = self.step() if not self._closed else 0.0
        finally:
            if self._woken.wait(pause):
                self._woken.clear()
        return not self._closed
