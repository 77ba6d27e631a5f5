"""Between node workers: what each holds in memory, and replicas of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....storage.format import keys


@dataclass(frozen=True)
class AttemptKey:
    """An attempt: the id of its repository, the id of the version that it becomes, and its token."""

    repository: str
    id: int
    token: str


@dataclass(frozen=True)
class NodePart:
    """What a node keeps of the objects that one node has made for an attempt.

    Args:
        objects: Their sizes by key.
        replica_order: For a copy, the nodes that maintain its copies, each once those before it are gone; empty at the node
            that made the objects.
        incomplete: Whether some of the objects do not fit into memory.
    """

    objects: Mapping[str, int] = field(default_factory=dict)
    replica_order: tuple[str, ...] = ()
    incomplete: bool = False


@dataclass(frozen=True)
class Holding:
    """What a node's memory holds of an attempt.

    Args:
        parts: By the number in the attempt of the node that made them.
        committed: The attempt is a version.
        given_up: It will not be one, but may be restored until there is a newer one.
        base: The version that it may be a delta to.
    """

    attempt: AttemptKey
    parts: Mapping[int, NodePart] = field(default_factory=dict)
    committed: bool = False
    given_up: bool = False
    base: AttemptKey | None = None

    @property
    def whole(self) -> set[int]:
        """Numbers of the nodes all of whose objects are here: the fragment, which names the others, is always the last."""
        return {n for n, part in self.parts.items() if not part.incomplete and self.fragment(n) in part.objects}

    def fragment(self, number: int) -> str:
        """Return the key of the fragment of node ``number``."""
        return keys.fragment(self.attempt.id, self.attempt.token, number)


@dataclass(frozen=True)
class Replica:
    """An object for another node's memory.

    Args:
        number: Number in the attempt of the node that made the object.
        replica_order: See ``NodePart``.
        after: Keys of the objects that must be there first.
        base: The version that the attempt may be a delta to.
    """

    attempt: AttemptKey
    number: int
    key: str
    replica_order: tuple[str, ...]
    after: tuple[str, ...] = ()
    base: AttemptKey | None = None


@dataclass(frozen=True)
class ReplicationProgress:
    """How many bytes of replicas this node maintains on its ``partners``, and how many there should be."""

    expected: int = 0
    present: int = 0
    partners: tuple[str, ...] = ()


@dataclass(frozen=True)
class PutReplica:
    """Hands a replica over; its ``length`` bytes follow. The answer is a ``NodePart``."""

    replica: Replica
    length: int
