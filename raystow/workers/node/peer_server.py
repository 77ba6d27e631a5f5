"""Serves other node workers: sends byte ranges of objects in memory, keeps replicas, and assigns reads from the store."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from dataclasses import dataclass

from ...storage.errors import ClusterError, DeadlineExceeded, ProtocolError
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ..cache.fetcher import Fetcher
from ..journal.node_journal import NodeJournal
from ..protocol.messages import (
    JOURNAL,
    ClaimSpan,
    Contact,
    ObjectState,
    PutEntry,
    ReadObject,
    Replica,
    SpanClaims,
)
from ..protocol.peer_tls import server_context
from ..protocol.tcp_channel import PROOF_SECONDS, TcpChannel
from ..replication.replica_store import ReplicaStore
from ..usage import Usage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerLimits:
    """What a node worker grants its callers.

    Attributes:
        callers: Connections at a time, each on a thread.
        unproven: Those without a proof; one more ends the oldest, so that nobody can lock out the others.
        proof: Seconds within which a caller must have proved that it knows the secret.
        wait: Seconds after which a caller gets the answer that its bytes are still being read.
    """

    callers: int = 1024
    unproven: int = 64
    proof: float = PROOF_SECONDS
    wait: float = 5.0


_LIMITS = PeerLimits()

_MAX_REPLICA = 1 << 30  # bytes


class PeerServer:
    """Listens at ``host``, an address of this node, until ``close``. ``tls``: whether the traffic is encrypted.

    Reads count as ``usage`` of this node, copies do not: else nodes that nobody uses would keep each other in use.
    """

    def __init__(
        self,
        host: str,
        fetcher: Fetcher,
        replicas: ReplicaStore,
        journal: NodeJournal,
        *,
        usage: Usage,
        tls: bool = True,
        limits: PeerLimits = _LIMITS,
    ) -> None:
        self._fetcher, self._replicas, self._journal = fetcher, replicas, journal
        self._usage, self._limits = usage, limits
        self._closed = False
        self._channels = set[TcpChannel]()
        self._unproven = dict[TcpChannel, None]()  # oldest first
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        certificate = ""
        if tls:
            self._context, certificate = server_context()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        secret = "".join(SYSTEM.token() for _ in range(4))
        self.contact = Contact(host, self._socket.getsockname()[1], secret, certificate)
        background.repeat("raystow-peer_server", self._accept)

    def close(self) -> None:
        """Accept no more connections, and close those that are open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in list(self._channels):
            channel.shut()

    def _accept(self) -> bool:
        try:
            channel = TcpChannel(self._socket.accept()[0])
        except OSError:  # the caller has closed at once, or this process has too many open files
            if self._closed:
                return False
            raise
        try:
            if not self._admit(channel):
                raise RuntimeError(f"more than {self._limits.callers} connections from other nodes")
            background.start("raystow-peer", self._serve, channel)
        except RuntimeError:
            self._close(channel)  # the caller reads from the store
            raise
        return True

    def _admit(self, channel: TcpChannel) -> bool:
        """Note a connection, and close the oldest one without a proof if there are too many. False if there are too many callers
        with one."""
        with self._lock:
            admitted = len(self._channels) - len(self._unproven) < self._limits.callers
            self._channels.add(channel)
            self._unproven[channel] = None
            oldest = next(iter(self._unproven)) if len(self._unproven) > self._limits.unproven else None
            if oldest is not None:
                self._channels.discard(oldest)
                del self._unproven[oldest]
        if oldest is not None:
            oldest.shut()
        return admitted

    def _serve(self, channel: TcpChannel) -> None:
        try:
            channel.accept(self.contact.secret, self._context, within=self._limits.proof)
            with self._lock:
                self._unproven.pop(channel, None)
            while True:
                self._answer(channel, channel.receive(ReadObject, ClaimSpan, Replica, PutEntry, timeout=None))
        except OSError as error:
            logger.debug("a connection from another node has ended: %r", error)
        except ProtocolError as error:
            logger.warning("a connection from another node is closed: %s", error)
        finally:
            self._close(channel)

    def _close(self, channel: TcpChannel) -> None:
        channel.close()
        with self._lock:
            self._channels.discard(channel)
            self._unproven.pop(channel, None)

    def _answer(self, channel: TcpChannel, request: object) -> None:
        match request:
            case ReadObject():
                with self._usage.visit():
                    self._send(channel, request)
            case ClaimSpan(round, key, span, node, lost):
                with self._usage.visit():
                    channel.send(SpanClaims(tuple(self._fetcher.claims.claim(round, key, span, node, lost=lost))))
            case Replica():
                if not 0 <= request.size <= min(_MAX_REPLICA, self._replicas.most):
                    raise ProtocolError(f"a replica of {request.size} bytes")
                data = bytearray(request.size)
                channel.receive_into(memoryview(data))
                channel.send(self._replicas.accept(request, data))
            case PutEntry():
                try:
                    channel.send(self._journal.accept(request))
                except ClusterError as error:
                    raise ConnectionError(f"an entry is not copied: {error}") from error

    def _send(self, channel: TcpChannel, request: ReadObject) -> None:
        start, length = request.start, request.length
        try:
            if request.key.startswith(JOURNAL):
                content = self._journal.named(request.repository, request.key)
                self._send_content(channel, None if content is None else content[start : start + length], length)
                return
            lent = self._fetcher.lend(request.repository, request.key, (start, start + length), self._limits.wait)
        except DeadlineExceeded:
            channel.send(ObjectState("pending"))
            return
        if lent is None:
            channel.send(ObjectState("absent"))
            return
        try:
            channel.send(ObjectState("present"))
            for at, size in lent.spans(start, length):
                channel.send_file(lent.descriptor, at, size)
        finally:
            lent.close()

    def _send_content(self, channel: TcpChannel, content: memoryview | None, length: int) -> None:
        if content is None:
            channel.send(ObjectState("absent"))
            return
        if content.nbytes != length:
            raise ConnectionError("the object ends before what was requested")
        channel.send(ObjectState("present"))
        channel.send_bytes(content)  # half the time of ``send_file``, which passes on page after page
