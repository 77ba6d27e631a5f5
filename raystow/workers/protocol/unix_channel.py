"""The Unix socket between a process of a node and its node worker: messages, each preceded by its length, some with a descriptor.

The end of the socket is the one reliable sign that the other process is gone. The staging ring is handed over as a descriptor: it
has no name in the file system that a crash could leave behind.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import queue
import select
import socket
import struct
import threading
import weakref
from typing import TypeVar

from ...storage.errors import ClusterError, ProtocolError
from ...storage.runtime import background
from .messages import GREETING, Message, check_greeting, decode, encode

logger = logging.getLogger(__name__)

_Message = TypeVar("_Message", bound=Message)
HANDSHAKE = 60.0
"""Seconds within which the other process must answer a new connection."""
_DRAIN = 10.0  # seconds that ``close`` waits for the peer to read the last messages
_LENGTH = struct.Struct("<I")

MAX_MESSAGE = 256 << 20
"""Bytes of a message."""


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, or as root."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), 0)


class Listener:
    """Accepts connections from processes of this user on this machine, under a random abstract name."""

    def __init__(self, name: str) -> None:
        self.name, self._closed = name, False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + name)
        self._socket.listen(256)

    def accept(self) -> Connection | None:
        """Return the next connection, before its handshake; None after ``close``.

        Raises:
            OSError: A connection could not be accepted: there are too many open files, or the peer has closed already. The next
                call may succeed.
        """
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return None
                raise
            with contextlib.ExitStack() as refused:
                refused.enter_context(peer)
                if _is_ours(peer):
                    refused.pop_all()
                    return Connection(peer)
        return None

    def close(self) -> None:
        """Stop accepting."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Connection:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._sending, self._starting = threading.Lock(), threading.Lock()
        self._posted: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    @staticmethod
    def connect(name: str, *, patience: float = HANDSHAKE) -> Connection:
        """Connect to a ``Listener`` on this machine, within ``patience`` seconds.

        Raises:
            ClusterError: Nothing listens under this name, or a process of another user does, or it accepts no connection.
            ProtocolError: The node worker speaks another version of the protocol.
        """
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(patience))  # ``settimeout`` would not wait at all
            peer.connect("\0" + name)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
        except OSError as error:
            peer.close()
            raise ClusterError(f"the node worker does not answer: {error}", subject=name) from error
        if not _is_ours(peer):  # anyone may take the name of a dead node worker
            peer.close()
            raise ClusterError("a process of another user answers under the node worker's name", subject=name)
        connection = Connection(peer)
        _to_node_workers.add(connection)
        connection.handshake("the node worker", patience=patience)
        return connection

    def handshake(self, who: str, *, patience: float = HANDSHAKE) -> None:
        """Compare protocol versions; both ends do this first. Closes the connection if it raises."""
        try:
            self._socket.settimeout(patience)
            self._socket.sendall(GREETING)
            theirs = self._exactly(len(GREETING))
            self._socket.settimeout(None)
            if not theirs:
                raise ClusterError("closed the connection", subject=who)
            check_greeting(theirs, who)
        except OSError as error:
            self.close()
            raise ClusterError(f"does not answer: {error}", subject=who) from error
        except ClusterError:
            self.close()
            raise

    def send(self, message: Message, *, fd: int | None = None) -> None:
        """Send a message, with a descriptor if ``fd`` is given. Raises ``ClusterError`` if the other process is gone."""
        body = encode(message, most=MAX_MESSAGE)
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            with self._sending:
                self._socket.sendmsg([_LENGTH.pack(len(body))], ancillary)
                self._socket.sendall(body)
        except OSError as error:
            raise ClusterError(f"the other process is gone: {error}") from error

    def post(self, message: Message) -> None:
        """Send a message after all that were posted before, on a thread of the connection. If sending fails, the connection is
        shut down, and ``receive`` returns None."""
        with self._starting:
            if self._sender is None:
                self._sender = background.start("raystow-post", self._send_posted)
        self._posted.put(message)

    def _send_posted(self) -> None:
        while (message := self._posted.get()) is not None:
            try:
                self.send(message)
            except Exception as error:
                level = logging.INFO if type(error) is ClusterError else logging.WARNING  # ``receive`` tells that it is gone
                logger.log(level, "a message could not be sent: %s", error)
                self.shut()
                return

    def arrives(self, seconds: float) -> bool:
        """Whether ``receive`` returns without waiting, at the latest after ``seconds``."""
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
        except ValueError:  # it is closed
            return True
        return bool(waiting.poll(1000 * seconds))

    def receive(self, *expected: type[_Message], timeout: float | None = None) -> tuple[_Message, int | None] | None:
        """Return the next message, of one of these classes, and the descriptor sent with it; None when the peer is gone.

        With a ``timeout`` in seconds, which also limits sending, no other thread may send.

        Raises:
            ClusterError: Nothing came within ``timeout``. The connection is of no more use.
            ProtocolError: The peer sent something else. The connection is shut down.
        """
        try:
            if timeout is not None:
                self._socket.settimeout(timeout)
            head, ancillary, _, _ = self._socket.recvmsg(_LENGTH.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            fds = [struct.unpack("i", data[:4])[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
            with contextlib.ExitStack() as broken:
                for fd in fds:
                    broken.callback(os.close, fd)
                head += self._exactly(_LENGTH.size - len(head)) if head else b""
                if len(head) < _LENGTH.size:
                    return None
                (length,) = _LENGTH.unpack(head)
                if length > MAX_MESSAGE:
                    raise ProtocolError(f"a message of {length} bytes exceeds {MAX_MESSAGE}")
                body = self._exactly(length)
                if len(body) < length:
                    return None
                if timeout is not None:
                    self._socket.settimeout(None)
                message = decode(body, *expected)
                broken.pop_all()
            return message, fds[0] if fds else None
        except TimeoutError as error:
            raise ClusterError(f"the other process did not answer within {timeout:g} s") from error
        except OSError:
            return None
        except ProtocolError:
            self.shut()
            raise

    def _exactly(self, length: int) -> bytes:
        parts = []
        while length and (part := self._socket.recv(min(length, 1 << 20))):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def fileno(self) -> int:
        """Return the descriptor of the socket, as ``select`` calls for; -1 after ``close``."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection after posted messages have been sent; a thread that is receiving gets None."""
        if self._sender is not None:
            self._posted.put(None)
            self._sender.join(_DRAIN)
        self.shut()
        self._socket.close()

    def shut(self) -> None:
        """End the connection at once; ``close`` still has to be called."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)


_to_node_workers = weakref.WeakSet[Connection]()


def _close_copies() -> None:
    """Let node workers see the end of the parent, which this process may outlive. Takes no lock: it may stay held here."""
    for connection in list(_to_node_workers):
        connection._socket.close()


os.register_at_fork(after_in_child=_close_copies)
