"""The workers of other nodes, as this node sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..storage.object_store import Buffer
from .protocol.messages import AttemptKey, Claim, EntryKept, Holding, NodePart, PutEntry, Replica, Span


class NodePeers:
    """The workers of other nodes: here of a node without peers. Methods of subclasses raise ``ClusterError`` if one, or for
    ``nodes`` the head node, does not answer."""

    def nodes(self) -> Mapping[str, str]:
        """Live nodes with a worker, also this one -> their failure domains."""
        return {}

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with an object's bytes from ``start``; return whether the node has them. Waits while the
        node reads them from the store."""
        return False

    def claim(self, owner: str, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """See ``ReadClaims.claim``: at the node ``owner``."""
        return [(*span, node)]

    def holdings(self, node: str, repository: str) -> Sequence[Holding]:
        """Return what a node has of a repository in memory."""
        return []

    def accept(self, node: str, replica: Replica, data: Buffer) -> NodePart:
        """Send an object to a node; return what the node has of that part then."""
        return NodePart(incomplete=True)

    def committed(self, node: str, attempt: AttemptKey) -> None:
        """Tell a node that an attempt is a version."""

    def given_up(self, node: str, attempt: AttemptKey) -> None:
        """Tell a node that an attempt will never be a version."""

    def put_entry(self, node: str, put: PutEntry) -> EntryKept:
        """Let a node read a copy of an entry of the step journal, unless it has one. The answer names its memory."""
        return EntryKept(put.info.step, 0, "there is no such node")
