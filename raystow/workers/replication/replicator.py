"""Keeps replicas of this node's objects in the memory of other nodes, so that a dead node's part of a version need not be read
from the store.

A reconciler: it compares what this node has with what its partners have, and sends the next missing object. All its state can be
rebuilt by asking the partners again.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from ...storage.errors import RaystowError
from ...storage.log import about
from ...storage.runtime.clock import Clock
from ...storage.stores.settings import StoreAddress
from ..cache.tier import MemoryTier
from ..node_peers import NodePeers
from ..protocol.messages import AttemptKey, Holding, NodePart, Replica, ReplicationProgress
from .reconciler import LOOK, PartnerNodes, Reconciler

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class Replicator(Reconciler):
    """See ``Reconciler``. ``node``: the name of this node. ``stores``: of repositories, see ``ReplicaStore``."""

    def __init__(
        self,
        node: str,
        tier: MemoryTier,
        peers: NodePeers,
        clock: Clock,
        *,
        stores: Mapping[str, StoreAddress] | None = None,
    ) -> None:
        super().__init__()
        self._stores = {} if stores is None else stores
        self._node, self._tier, self._peers, self._clock = node, tier, peers, clock
        self._partners = PartnerNodes(node, peers, clock)
        self._replicas: dict[str, int] = {}  # by repository
        self._rate = math.inf
        self._given_up: deque[AttemptKey] = deque()
        self._seen: dict[str, dict[AttemptKey, Holding]] = {}  # node -> what it had in memory when it was last asked
        self._inherited: set[tuple[AttemptKey, int]] = set()
        self._looked = self._ready = -math.inf
        self._complete = True
        self.progress = ReplicationProgress()

    def want(self, repository: str, replicas: int, rate: float | None) -> None:
        """Copy this node's parts of a repository to ``replicas`` other nodes; all copies together take at most ``rate`` bytes per
        second."""
        self._replicas = {**self._replicas, repository: replicas}  # another thread may iterate over the old one
        self._rate = rate or math.inf
        self.wake()

    def give_up(self, attempt: AttemptKey) -> None:
        """Tell the nodes that hold replicas of an attempt that it will never be a version."""
        self._given_up.append(attempt)
        self.wake()

    def step(self) -> float:
        """See ``Reconciler``."""
        now = self._clock.monotonic()
        looking = now - self._looked >= LOOK
        if looking:
            self._look(now)
        self._tell()
        missing = self._next_missing()
        if looking:
            self._report()
        if missing is not None and now >= self._ready:
            self._push(*missing)
            return 0.0
        return max(0.0, min(self._ready if missing is not None else math.inf, self._looked + LOOK) - now)

    def _look(self, now: float) -> None:
        """Update which nodes there are, what the relevant ones have in memory, and for which replicas this node is responsible.

        This node's memory is read first: if a node before it in a replica order then has nothing, that node has lost the part.
        """
        mine, self._looked = self._mine(), now
        degrees = {*self._replicas.values(), *(self._degree(held, part) for held in mine for part in held.parts.values())}
        self._partners.refresh(degrees)
        matter = {node for n in degrees for node in self._partners.of(n)}
        alive = self._partners.zones
        matter |= {node for held in mine for part in held.parts.values() for node in part.replica_order if node in alive}
        repositories = {held.attempt.repository for held in mine}
        self._seen = {}
        for node in sorted(node for node in matter - {self._node} if self._partners.answers(node)):
            for repository in repositories:
                held = self._ask(node, functools.partial(self._peers.holdings, node, repository))
                self._seen.setdefault(node, {}).update({one.attempt: one for one in held or ()})
        self._inherited = {(held.attempt, number) for held in mine for number in held.whole if self._inherits(held, number)}

    def _degree(self, held: Holding, part: NodePart) -> int:
        """The number of copies that a part should have. If no process has set it here: as many as the nodes before it kept."""
        return self._replicas.get(held.attempt.repository, max(0, len(part.replica_order) - 1))

    def _inherits(self, held: Holding, number: int) -> bool:
        """Whether this node maintains the copies of a replica: no node before it in its order has it, or a newer version."""
        order = held.parts[number].replica_order
        for node in _before(self._node, order):
            for attempt, theirs in self._seen.get(node, {}).items():
                newer = attempt.repository == held.attempt.repository and attempt.id > held.attempt.id and theirs.committed
                if newer and theirs.base != held.attempt:
                    return False
                if attempt == held.attempt and number in theirs.whole:
                    # Another node may have sent it later, in another order: then one of the two maintains them.
                    after = self._node in _before(node, theirs.parts[number].replica_order)
                    if not after or node < self._node:
                        return False
        return bool(order)

    def _tell(self) -> None:
        """Tell the other nodes which attempts are versions, and which never will be. A node that is not reached finds out when
        the next version replaces this one."""
        mine = {held.attempt: held for held in self._mine()}
        for node, attempts in list(self._seen.items()):
            for attempt, theirs in list(attempts.items()):
                held = mine.get(attempt, Holding(attempt))
                if held.committed and not theirs.committed:
                    attempts[attempt] = replace(theirs, committed=True)
                    self._ask(node, functools.partial(self._peers.committed, node, attempt))
                elif held.given_up and not (theirs.committed or theirs.given_up):
                    attempts[attempt] = replace(theirs, given_up=True)
                    self._ask(node, functools.partial(self._peers.given_up, node, attempt))
        while self._given_up:
            attempt = self._given_up.popleft()
            for node, attempts in list(self._seen.items()) if attempt not in mine else ():
                if attempts.pop(attempt, None) is not None:
                    self._ask(node, functools.partial(self._peers.given_up, node, attempt))

    def _next_missing(self) -> tuple[str, Replica] | None:
        """Update the progress; return the next object to send, and the node that should have it but lacks it."""
        expected, present, chosen = 0, 0, dict[str, None]()
        missing: tuple[str, Replica] | None = None
        mine = self._mine()
        newest = {held.attempt.repository: held for held in mine if held.committed}  # ids ascend
        for held in mine:
            last = newest.get(held.attempt.repository, held)
            if held.committed and held.attempt.id < last.attempt.id and held.attempt != last.base:
                continue  # is here only for a save under way
            for number, part in held.parts.items():
                if part.incomplete or (part.replica_order and (held.attempt, number) not in self._inherited):
                    continue
                replicas = self._degree(held, part)
                expected += sum(part.objects.values()) * replicas
                order = self._node, *self._partners.of(replicas)
                for partner in order[1:]:
                    chosen[partner] = None
                    theirs = self._seen.get(partner, {}).get(held.attempt, Holding(held.attempt)).parts.get(number, NodePart())
                    present += sum(size for key, size in part.objects.items() if key in theirs.objects)
                    if missing is None and not theirs.incomplete and (replica := _lacking(held, number, theirs, order)):
                        missing = partner, replica
        self.progress = ReplicationProgress(expected, present, tuple(chosen))
        return missing

    def _push(self, node: str, replica: Replica) -> None:
        data = self._tier.view(replica.attempt.repository, replica.key)
        if data is None:
            return  # replaced or given up meanwhile
        self._ready = self._clock.monotonic() + data.nbytes / self._rate
        uri, place = self._stores.get(replica.attempt.repository, ("", ""))
        sent = replace(replica, uri=uri, place=place)
        part = self._ask(node, lambda: self._peers.accept(node, sent, data))
        if part is None:
            return
        if part.incomplete:
            log = about(logger, version=replica.attempt.id, attempt=replica.attempt.token)
            log.warning("node %s has no memory for a copy of version %d", node, replica.attempt.id)
        if replica.key not in part.objects:  # refused for any reason: not sent again before the node is asked again
            part = replace(part, incomplete=True)
        seen = self._seen.setdefault(node, {})
        theirs = seen.get(replica.attempt, Holding(replica.attempt))
        seen[replica.attempt] = replace(theirs, parts={**theirs.parts, replica.number: part})

    def _ask(self, node: str, question: Callable[[], _Answer]) -> _Answer | None:
        """Return a node's answer; None if there is none: then it is no partner for a while, and others are chosen at once."""
        if not self._partners.answers(node):
            return None
        try:
            return question()
        except RaystowError as error:
            self._partners.shun(node, error)
            self._looked = -math.inf
            return None

    def _mine(self) -> list[Holding]:
        return [held for repository in sorted(self._tier.repositories()) for held in self._tier.holdings(repository)]

    def _report(self) -> None:
        complete = self.progress.present >= self.progress.wanted
        if complete != self._complete:
            self._complete = complete
            said = "complete" if complete else "incomplete"
            logger.info("copies on other nodes are %s: %d of %d bytes", said, self.progress.present, self.progress.wanted)


def _before(node: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """The nodes before one in an order."""
    return tuple(itertools.takewhile(lambda other: other != node, order))


def _lacking(held: Holding, number: int, theirs: NodePart, order: tuple[str, ...]) -> Replica | None:
    """The next object of a part that another node lacks. The fragment comes last, since a part with a fragment counts as
    complete."""
    objects, fragment = held.parts[number].objects, held.fragment(number)
    packs = [key for key in objects if key != fragment]
    for key in packs:
        if key not in theirs.objects:
            return Replica(held.attempt, number, key, objects[key], order, base=held.base)
    if fragment in objects and fragment not in theirs.objects:
        return Replica(held.attempt, number, fragment, objects[fragment], order, tuple(packs), held.base)
    return None
