"""A TCP connection between two node workers: messages, each preceded by its length, and raw bytes after some of them.

The handshake compares protocol versions, and both sides prove that they know the secret of the node that was called, without
sending it. The traffic is not encrypted: receivers check stored bytes against their digests. Every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from typing import TypeVar

from ...storage.clock import SYSTEM
from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer
from .messages import GREETING, Contact, Message, check_greeting, decode, encode

MAX_MESSAGE = 1 << 20
"""Bytes of a message; the raw bytes after it do not count."""

_Message = TypeVar("_Message", bound=Message)
_LENGTH = struct.Struct("<I")
_STALL = 15.0  # seconds within which some bytes must move
_TRANSFER = 60.0  # seconds within which all bytes after a message must be transferred
_KEEPALIVE = (socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)  # detects a peer without power
_NONCE, _PROOF = 16, 32  # bytes


class TcpChannel:
    """One end of a connection.

    Every method raises ``OSError`` when the connection is broken (``TimeoutError`` if the peer may be alive but is too slow) and
    ``ProtocolError`` if the peer does not follow the protocol. The channel is unusable after either.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        peer.settimeout(_STALL)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    def connect(contact: Contact) -> TcpChannel:
        """Connect to the node worker that listens at ``contact``."""
        channel = TcpChannel(socket.create_connection((contact.host, contact.port), _STALL))
        try:
            mine = _nonce()
            channel._socket.sendall(GREETING + mine)
            check_greeting(channel._exactly(len(GREETING)), f"{contact.host}:{contact.port}")
            theirs = channel._exactly(_NONCE)
            if not hmac.compare_digest(channel._exactly(_PROOF), _proof(contact.secret, b"answers", mine, theirs)):
                raise ConnectionRefusedError(f"{contact.host}:{contact.port} does not know the secret of the node worker")
            channel._socket.sendall(_proof(contact.secret, b"calls", mine, theirs))
        except BaseException:
            channel.close()
            raise
        return channel

    def accept(self, secret: str) -> None:
        """Do the handshake of the side that was called. Raises ``ConnectionRefusedError`` if the caller lacks the secret."""
        self._socket.sendall(GREETING)
        check_greeting(self._exactly(len(GREETING)), "the caller")
        theirs, mine = self._exactly(_NONCE), _nonce()
        self._socket.sendall(mine + _proof(secret, b"answers", theirs, mine))
        if not hmac.compare_digest(self._exactly(_PROOF), _proof(secret, b"calls", theirs, mine)):
            raise ConnectionRefusedError("the caller does not know the secret of this node worker")

    def send(self, message: Message) -> None:
        """Send a message."""
        body = encode(message, most=MAX_MESSAGE)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def send_bytes(self, data: Buffer) -> None:
        """Send the raw bytes after a message."""
        self._socket.settimeout(_TRANSFER)  # for all of them: sendall counts so
        self._socket.sendall(data)
        self._socket.settimeout(_STALL)

    def send_file(self, descriptor: int, start: int, length: int) -> None:
        """Send the raw bytes after a message from a file, without copying them."""
        with open(descriptor, "rb", closefd=False) as file:
            if self._socket.sendfile(file, start, length) != length:
                raise ConnectionError("the file ended")

    def receive(self, *expected: type[_Message], timeout: float | None = _STALL) -> _Message:
        """Return the next message, of one of these classes, which must begin within ``timeout`` seconds."""
        self._socket.settimeout(timeout)
        head = self._socket.recv(_LENGTH.size)
        self._socket.settimeout(_STALL)
        if not head:
            raise ConnectionError("the peer closed the connection")
        (length,) = _LENGTH.unpack(head + self._exactly(_LENGTH.size - len(head)))
        if length > MAX_MESSAGE:
            raise ProtocolError(f"a message of {length} bytes exceeds {MAX_MESSAGE}")
        return decode(self._exactly(length), *expected)

    def receive_into(self, target: memoryview) -> None:
        """Receive the raw bytes after a message."""
        end, got = SYSTEM.monotonic() + _TRANSFER, 0
        while got < target.nbytes:
            if SYSTEM.monotonic() > end:
                raise TimeoutError(f"{got} of {target.nbytes} bytes in {_TRANSFER:.0f} s")
            part = self._socket.recv_into(target[got:])
            if not part:
                raise ConnectionError("the peer closed the connection")
            got += part

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets a ``ConnectionError``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)


def _nonce() -> bytes:
    return bytes.fromhex(SYSTEM.token() + SYSTEM.token())


def _proof(secret: str, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), b"".join((who, *nonces)), "sha256")
