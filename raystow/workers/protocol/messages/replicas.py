"""Between node workers: what each holds in memory, and replicas of it."""

from __future__ import annotations

from ....storage.format import keys
from ..codec import Column, Message, MessagePart, Table, Text


class AttemptKey(MessagePart, frozen=True):
    """An attempt: the id of its repository, the id of the version that it becomes, and its token."""

    repository: Text
    id: int
    token: Text


class NodePart(Message, frozen=True):
    """What a node keeps of the objects that one node has made for an attempt.

    Args:
        objects: Their sizes by key.
        replica_order: For a copy, the nodes that maintain its copies, each once those before it are gone; empty at the node
            that made the objects.
        incomplete: Whether some of the objects do not fit into memory.
    """

    objects: Table[Text, int] = {}
    replica_order: Column[Text] = ()
    incomplete: bool = False


class Holding(Message, frozen=True):
    """What a node's memory holds of an attempt.

    Args:
        parts: By the number in the attempt of the node that made them.
        committed: The attempt is a version.
        given_up: It will not be one, but may be restored until there is a newer one.
        base: The version that it may be a delta to.
    """

    attempt: AttemptKey
    parts: Table[int, NodePart] = {}
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


class Replica(Message, frozen=True):
    """Hands an object over to another node's memory; its ``size`` bytes follow. The answer is a ``NodePart``.

    Args:
        number: Number in the attempt of the node that made the object.
        replica_order: See ``NodePart``.
        after: Keys of the objects that must be there first.
        base: The version that the attempt may be a delta to.
        uri, place: Of the repository, see ``StoreAddress``; empty if unknown.
    """

    attempt: AttemptKey
    number: int
    key: Text
    size: int
    replica_order: Column[Text]
    after: Column[Text] = ()
    base: AttemptKey | None = None
    uri: Text = ""
    place: Text = ""


class ReplicationProgress(MessagePart, frozen=True):
    """How many bytes of replicas this node maintains on its ``partners``, and how many there should be."""

    wanted: int = 0
    present: int = 0
    partners: Column[Text] = ()
