"""Calls from this node worker to those of other nodes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...storage.errors import ClusterError
from ...storage.object_store import Buffer
from ...storage.runtime.clock import Clock
from ..node_peers import NodePeers
from ..protocol.messages import (
    Claim,
    ClaimSpan,
    Contact,
    EntryKept,
    NodePart,
    ObjectState,
    PutEntry,
    ReadObject,
    Replica,
    Span,
    SpanClaims,
)
from ..protocol.tcp_channel import STALL, TcpChannel

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_IDLE = 64  # channels that are kept open
_SHUN = 1.0, 30.0  # the fewest and the most seconds for which a node that did not answer is not asked again
_SHARE = 3  # times the seconds of the attempt: for as long it is not asked again


class Peers(NodePeers):
    """Thread-safe. ``find`` returns where a node's worker listens. A call raises ``ClusterError`` if the node does not answer, or
    did not answer a moment ago: up to 30 seconds, so that waiting for dead nodes takes a quarter of the time at most.

    Attributes:
        patience: Seconds that another node may take to read bytes from the store or from this node.
        stall: Seconds within which bytes must move on a connection.
    """

    patience, stall = 60.0, STALL

    def __init__(self, find: Callable[[str], Contact], clock: Clock) -> None:
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._contacts: dict[str, Contact] = {}
        self._idle: OrderedDict[TcpChannel, str] = OrderedDict()
        self._shunned: dict[str, float] = {}  # until when

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with an object's bytes from ``start``; return whether the node has them. Waits while the node reads
        them from the store."""

        def ask(channel: TcpChannel) -> str:
            channel.send(ReadObject(repository, key, start, target.nbytes))
            state = channel.receive(ObjectState).state
            if state == "present":
                channel.receive_into(target)
            return state

        end = self._clock.monotonic() + self.patience
        while (state := self._talk(node, ask)) == "pending":
            if self._clock.monotonic() > end:
                raise ClusterError(f"has not read {key} after {self.patience:.0f} s", subject=f"node {node}")
        return state == "present"

    def claim(self, owner: str, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """See ``ReadClaims.claim``: at the node ``owner``."""

        def ask(channel: TcpChannel) -> list[Claim]:
            channel.send(ClaimSpan(round, key, span, node, tuple(lost)))
            return list(channel.receive(SpanClaims).claims)

        return self._talk(owner, ask)

    def accept(self, node: str, replica: Replica, data: Buffer) -> NodePart:
        """Give a node an object; return what it has of that part then."""

        def ask(channel: TcpChannel) -> NodePart:
            channel.send(replica)
            channel.send_bytes(data)
            return channel.receive(NodePart)

        return self._talk(node, ask)

    def put_entry(self, node: str, put: PutEntry) -> EntryKept:
        """Let a node read a copy of an entry of the step journal."""

        def ask(channel: TcpChannel) -> EntryKept:
            channel.send(put)
            return channel.receive(EntryKept, timeout=self.patience)

        return self._talk(node, ask)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for channel in self._idle:
                channel.close()
            self._idle.clear()

    def _talk(self, node: str, ask: Callable[[TcpChannel], _Answer]) -> _Answer:
        """Ask, and ask again if the connection was to a worker that has been restarted since."""
        with self._lock:
            if self._shunned.get(node, 0.0) > self._clock.monotonic():
                raise ClusterError("did not answer a moment ago", subject=f"node {node}")
            known = node in self._contacts
        began = self._clock.monotonic()
        try:
            try:
                return self._ask(node, ask)
            except ConnectionError:
                self._forget(node)
                if not known:
                    raise
                return self._ask(node, ask)
        except (OSError, ClusterError) as error:
            self._forget(node)
            with self._lock:
                now = self._clock.monotonic()
                self._shunned[node] = now + min(max(_SHARE * (now - began), _SHUN[0]), _SHUN[1])
            raise ClusterError(f"does not answer: {error}", subject=f"node {node}") from error

    def _ask(self, node: str, ask: Callable[[TcpChannel], _Answer]) -> _Answer:
        channel = self.channel(node)
        try:
            answer = ask(channel)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._idle[channel] = node
            if len(self._idle) > _IDLE:
                self._idle.popitem(last=False)[0].close()
        return answer

    def channel(self, node: str) -> TcpChannel:
        """Return a connection that no other thread uses."""
        with self._lock:
            channel = next((channel for channel, to in self._idle.items() if to == node), None)
            if channel is not None:
                del self._idle[channel]
                return channel
            contact = self._contacts.get(node)
        contact = contact or self._find(node)
        with self._lock:
            self._contacts[node] = contact
        return TcpChannel.connect(contact, stall=self.stall)

    def _forget(self, node: str) -> None:
        with self._lock:
            self._contacts.pop(node, None)
            for channel in [channel for channel, to in self._idle.items() if to == node]:
                del self._idle[channel]
                channel.close()
