"""Messages between a training process and its node worker: msgpack with a length before it, over a Unix socket.

A socket, because its end is the one sure sign that the other process is gone, and because it can hand over an open file: the
staging ring has no name in the file system that a crash could leave behind.
"""

from __future__ import annotations

import array
import logging
import os
import queue
import socket
import struct
import threading
from typing import Any

import msgpack

from ...storage.errors import ClusterError

logger = logging.getLogger(__name__)

_LAST = 10.0  # seconds that closing waits for a peer to take the last messages
_HEAD = struct.Struct("<I")
MAX_MESSAGE = 256 << 20
"""Bytes; a longer message is refused by both sides."""

Message = dict[str, Any]


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, or as root."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), 0)


class Listener:
    """Accepts connections from processes of this user on this machine, under a random abstract name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + name)
        self._socket.listen(256)

    def accept(self) -> Connection | None:
        """The next connection, or None after ``close``."""
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return None
            if _is_ours(peer):
                return Connection(peer)
            peer.close()

    def close(self) -> None:
        """Stop accepting."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Connection:
    """One end of a conversation. Any thread may send; one thread receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._sending = threading.Lock()
        self._posted: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._postman: threading.Thread | None = None

    @staticmethod
    def connect(name: str) -> Connection:
        """Connect to a ``Listener`` on this machine; ``ClusterError`` if it is gone."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect("\0" + name)
        except OSError as error:
            peer.close()
            raise ClusterError(f"the node worker does not answer: {error}", subject=name) from error
        if not _is_ours(peer):  # a dead node worker's name is free for anyone to take
            peer.close()
            raise ClusterError("another user's process answers under the node worker's name", subject=name)
        return Connection(peer)

    def send(self, message: Message, *, fd: int | None = None) -> None:
        """Send a message, with an open file beside it if ``fd`` is given. ``ClusterError`` if the other side is gone."""
        body = msgpack.packb(message)
        if len(body) > MAX_MESSAGE:
            raise ClusterError(f"a message of {len(body)} bytes is too long")
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            with self._sending:
                self._socket.sendmsg([_HEAD.pack(len(body))], ancillary)
                self._socket.sendall(body)
        except OSError as error:
            raise ClusterError(f"the other process is gone: {error}") from error

    def post(self, message: Message) -> None:
        """Send behind all that was posted before, on a thread of the connection: the caller waits for nobody. What cannot be sent
        ends the conversation, which shows in ``receive``."""
        if self._postman is None:
            self._postman = threading.Thread(target=self._deliver, name="raystow-post", daemon=True)
            self._postman.start()
        self._posted.put(message)

    def _deliver(self) -> None:
        while (message := self._posted.get()) is not None:
            try:
                self.send(message)
            except Exception as error:
                logger.warning("a message is not delivered: %s", error)
                self._shut()
                return

    def receive(self) -> tuple[Message, int | None] | None:
        """The next message and the file sent with it, or None when the other side is gone."""
        try:
            head, ancillary, _, _ = self._socket.recvmsg(_HEAD.size, socket.CMSG_SPACE(4))
            fds = [struct.unpack("i", data[:4])[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if len(head) < _HEAD.size:
                return None
            (length,) = _HEAD.unpack(head)
            body = self._exactly(length) if length <= MAX_MESSAGE else b""
            if len(body) < length:
                return None
        except OSError:
            return None
        message: Message = msgpack.unpackb(body)
        return message, fds[0] if fds else None

    def _exactly(self, length: int) -> bytes:
        parts = []
        while length and (part := self._socket.recv(min(length, 1 << 20))):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """End the conversation, after what was posted has been sent; a thread that is receiving gets None."""
        if self._postman is not None:
            self._posted.put(None)
            self._postman.join(_LAST)
        self._shut()
        self._socket.close()

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
