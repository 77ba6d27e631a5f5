"""Reads of stored objects: between a restoring process and its node worker, and between node workers."""

from __future__ import annotations

from typing import Literal

from ....storage.coding.digest import stored_digest
from ....storage.stores.settings import StoreAddress, StoreSettings
from ..codec import Column, CoordinatorRequest, Message, MessagePart, Table, Text
from .coordinator import Acknowledged

Span = tuple[int, int]
"""The first byte and the one after the last."""


Claim = tuple[int, int, Text]
"""The first byte, the one after the last, and the node that reads them from the store."""


class ReadCached(Message, frozen=True):
    """Asks for spans of an object of ``size`` bytes, through the node's memory. While the node worker is still reading it sends
    ``Acknowledged``, before the answer.

    Args:
        uri: Of the store.
        place: See ``StoreSettings``.
        nearby: Nodes that may have the object in memory, the nearest first.
        round: Identifies the restore.
        owner: The node that assigns reads of the object in this restore; empty if only one node restores.
    """

    repository: Text
    key: Text
    size: int
    spans: Column[Span]
    nearby: Column[Text] = ()
    round: Text = ""
    owner: Text = ""
    uri: Text = ""
    place: Text = ""

    @property
    def store(self) -> StoreAddress:
        """The store."""
        return StoreAddress(self.uri, self.place)


class OpenStore(CoordinatorRequest[Acknowledged], frozen=True):
    """What reaches the store at ``uri``: sent to a coordinator and to a node worker before anything that needs the store, and
    whenever it has changed. Its text shows no credentials."""

    uri: Text
    settings: StoreSettings


class RenewSettings(Message, frozen=True):
    """From a node worker to a process that has sent ``KeepNode``: a store has refused the credentials of its job. The process
    sends ``OpenStore`` to its actors, with what it has now."""


class CachedObject(Message, frozen=True):
    """The answer, sent with a descriptor of the memory.

    Args:
        read: Bytes that were read for this request, by source.
        whole: Whether the whole object is in that memory, not only the spans.
        extents: Where its bytes are in that memory, one after the other; if empty, at the beginning.
        others: By key, where other whole objects of the version are in it.
    """

    read: Table[Text, int]
    whole: bool
    extents: Column[Span] = ()
    others: Table[Text, Column[Span]] = {}


class ReadFailed(Message, frozen=True):
    """The node worker could not read an object."""

    reason: Text
    store_unavailable: bool


class Contact(Message, frozen=True):
    """Where a node worker listens, the secret that a caller must prove to know (hexadecimal), and the certificate of its TLS
    (PEM); without one it does not use TLS."""

    host: Text
    port: int
    secret: Text
    certificate: Text = ""


class ReadObject(Message, frozen=True):
    """Asks for ``length`` bytes of an object from ``start``."""

    repository: Text
    key: Text
    start: int
    length: int


class ObjectState(Message, frozen=True):
    """The answer. ``present``: the bytes follow; ``pending``: the node is reading them, ask again; ``absent``: it has none."""

    state: Literal["present", "pending", "absent"]


class ClaimSpan(Message, frozen=True):
    """Asks who reads a span of an object from the store: see ``read_dedup.ReadClaims``."""

    round: Text
    key: Text
    span: Span
    node: Text
    lost: Column[Text] = ()


class SpanClaims(Message, frozen=True):
    """The answer: the span in parts, ascending."""

    claims: Column[Claim]


class RestoreGroup(MessagePart, frozen=True):
    """The nodes that restore together. ``round`` identifies the restore."""

    round: Text = ""
    nodes: Column[Text] = ()

    def owner(self, key: str) -> str:
        """Return the node that assigns reads of an object; empty if there is only one node."""
        if len(self.nodes) < 2:
            return ""
        return self.nodes[int.from_bytes(stored_digest(key.encode())[:8], "little") % len(self.nodes)]


NO_GROUP = RestoreGroup()
"""A rank that restores alone."""
