"""Reads of stored objects: between a restoring process and its node worker, and between node workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ....storage.coding.digest import stored_digest

Span = tuple[int, int]
"""The first byte and the one after the last."""


Claim = tuple[int, int, str]
"""The first byte, the one after the last, and the node that reads them from the store."""


@dataclass(frozen=True)
class ReadCached:
    """Asks for spans of an object of ``size`` bytes, through the node's memory.

    Args:
        uri: Of the store.
        nearby: Nodes that may have the object in memory, the nearest first.
        round: Identifies the restore.
        owner: The node that assigns reads of the object in this restore; empty if only one node restores.
    """

    repository: str
    key: str
    size: int
    spans: tuple[Span, ...]
    nearby: tuple[str, ...] = ()
    round: str = ""
    owner: str = ""
    uri: str = ""


@dataclass(frozen=True)
class CachedObject:
    """The answer, sent with a descriptor of the memory.

    Args:
        read: Bytes that were read for this request, by source.
        whole: Whether the whole object is in that memory, not only the spans.
    """

    read: Mapping[str, int]
    whole: bool


@dataclass(frozen=True)
class ReadFailed:
    """The node worker could not read an object."""

    reason: str
    store_unavailable: bool


@dataclass(frozen=True)
class Contact:
    """Where a node worker listens, and the secret that a caller must prove to know: hexadecimal."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True)
class ReadObject:
    """Asks for ``length`` bytes of an object from ``start``."""

    repository: str
    key: str
    start: int
    length: int


@dataclass(frozen=True)
class ObjectState:
    """The answer. ``present``: the bytes follow; ``pending``: the node is reading them, ask again; ``absent``: it has none."""

    state: Literal["present", "pending", "absent"]


@dataclass(frozen=True)
class ClaimSpan:
    """Asks who reads a span of an object from the store: see ``read_dedup.ReadClaims``."""

    round: str
    key: str
    span: Span
    node: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpanClaims:
    """The answer: the span in parts, ascending."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class RestoreGroup:
    """The nodes that restore together. ``round`` identifies the restore."""

    round: str = ""
    nodes: tuple[str, ...] = ()

    def owner(self, key: str) -> str:
        """Return the node that assigns reads of an object; empty if there is only one node."""
        if len(self.nodes) < 2:
            return ""
        return self.nodes[int.from_bytes(stored_digest(key.encode())[:8], "little") % len(self.nodes)]


NO_GROUP = RestoreGroup()
"""A rank that restores alone."""
