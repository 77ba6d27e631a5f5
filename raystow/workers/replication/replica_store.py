"""The replicas in this node's memory that other nodes maintain."""

from __future__ import annotations

from ...storage.object_store import Buffer
from ...storage.stores.settings import StoreAddress
from ..cache.tier import MemoryTier
from ..protocol.messages import AttemptKey, Holding, NodePart, Replica


class ReplicaStore:
    """Thread-safe.

    Attributes:
        stores: Of the repositories, by their ids, as far as they are known.
    """

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self.stores: dict[str, StoreAddress] = {}

    @property
    def most(self) -> int:
        """Bytes of the largest object that could fit."""
        return self._tier.budget

    def accept(self, replica: Replica, data: Buffer) -> NodePart:
        """Keep an object if it fits; return what is kept of its part now."""
        if replica.uri:
            self.stores[replica.attempt.repository] = StoreAddress(replica.uri, replica.place)
        newer = [other for other in self._tier.holdings(replica.attempt.repository) if other.attempt.id > replica.attempt.id]
        is_base = any(other.base == replica.attempt for other in newer)
        if not is_base and any(other.committed or other.given_up for other in newer):
            return NodePart()  # replaced already: it would stay until the version after that
        part = self._part(replica) or NodePart(replica_order=replica.replica_order)
        follows = replica.key not in part.objects and part.objects.keys() >= {*replica.after}
        if follows and part.replica_order and not part.incomplete:
            self._tier.put(replica.attempt, replica.number, replica.key, [data], replica_order=replica.replica_order)
            if replica.base is not None:
                self._tier.set_base(replica.attempt, replica.base)
        return self._part(replica) or NodePart()

    def committed(self, attempt: AttemptKey) -> None:
        """An attempt is a version."""
        if attempt in self._tier:
            self._tier.committed(attempt)

    def given_up(self, attempt: AttemptKey) -> None:
        """Another node says that an attempt will never be a version. A node that has a part in it hears that for itself."""
        held = self._held(attempt)
        if held is not None and not held.committed and all(part.replica_order for part in held.parts.values()):
            self._tier.given_up(attempt)

    def _held(self, attempt: AttemptKey) -> Holding | None:
        return next((held for held in self._tier.holdings(attempt.repository) if held.attempt == attempt), None)

    def _part(self, replica: Replica) -> NodePart | None:
        held = self._held(replica.attempt)
        return held.parts.get(replica.number) if held is not None else None
