"""A conversation between two node workers: JSON with a length before it, and bytes behind it as they lie in memory, over TCP.

Both ends prove that they know the secret that came to them through Ray, without sending it. What goes over the line is neither
encrypted nor believed: it is what lies in the store, and is held against its digests. Every wait has an end.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

from ...storage.clock import SYSTEM
from ...storage.object_store import Buffer

Message = dict[str, Any]

_HEAD = struct.Struct("<I")
_MAX_MESSAGE = 1 << 20  # bytes; only bytes behind a message are many
_STALL = 15.0  # seconds in which something must move
_PIECE = 60.0  # seconds in which the bytes behind a message must have come
_SILENCE = (socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)  # who has lost power is found out
_NONCE, _PROOF = 16, 32  # bytes


@dataclass(frozen=True)
class Contact:
    """Where a node worker listens, and the secret that whoever calls must know: hexadecimal."""

    host: str
    port: int
    secret: str


class Line:
    """One end. ``OSError`` from any method: the line is of no use any more (``TimeoutError``: the other end is alive perhaps, but
    does not move)."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        peer.settimeout(_STALL)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    def call(contact: Contact) -> Line:
        """To the node worker that listens there."""
        line = Line(socket.create_connection((contact.host, contact.port), _STALL))
        try:
            mine = _nonce()
            line._socket.sendall(mine)
            theirs = line._exactly(_NONCE)
            if not hmac.compare_digest(line._exactly(_PROOF), _proof(contact.secret, b"answers", mine, theirs)):
                raise ConnectionRefusedError(f"who listens at {contact.host}:{contact.port} is not the node worker")
            line._socket.sendall(_proof(contact.secret, b"calls", mine, theirs))
        except BaseException:
            line.close()
            raise
        return line

    def answer(self, secret: str) -> None:
        """Begin as the one that was called; ``ConnectionRefusedError`` if the caller does not know the secret."""
        theirs, mine = self._exactly(_NONCE), _nonce()
        self._socket.sendall(mine + _proof(secret, b"answers", theirs, mine))
        if not hmac.compare_digest(self._exactly(_PROOF), _proof(secret, b"calls", theirs, mine)):
            raise ConnectionRefusedError("the caller is no node worker of this cluster")

    def send(self, message: Message) -> None:
        """A message."""
        body = json.dumps(message).encode()
        self._socket.sendall(_HEAD.pack(len(body)) + body)

    def send_bytes(self, data: Buffer) -> None:
        """The bytes behind a message."""
        self._socket.settimeout(_PIECE)  # for all of them: sendall counts so
        self._socket.sendall(data)
        self._socket.settimeout(_STALL)

    def send_file(self, descriptor: int, start: int, length: int) -> None:
        """The bytes behind a message, straight from where they lie."""
        with open(descriptor, "rb", closefd=False) as file:
            if self._socket.sendfile(file, start, length) != length:
                raise ConnectionError("the file ended")

    def receive(self, *, patience: float | None = _STALL) -> Message:
        """The next message, if it begins to come within ``patience`` seconds; None: whenever it does."""
        self._socket.settimeout(patience)
        head = self._socket.recv(_HEAD.size)
        self._socket.settimeout(_STALL)
        if not head:
            raise ConnectionError("the other end has hung up")
        (length,) = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head)))
        if length > _MAX_MESSAGE:
            raise ConnectionError(f"a message of {length} bytes is too long")
        message: Message = json.loads(self._exactly(length))
        return message

    def fill(self, target: memoryview) -> None:
        """The bytes behind a message, straight to where they belong."""
        end, got = SYSTEM.monotonic() + _PIECE, 0
        while got < target.nbytes:
            if SYSTEM.monotonic() > end:
                raise TimeoutError(f"{got} of {target.nbytes} bytes in {_PIECE:.0f} s")
            part = self._socket.recv_into(target[got:])
            if not part:
                raise ConnectionError("the other end has hung up")
            got += part

    def close(self) -> None:
        """Hang up; a thread that waits for a message gets a ``ConnectionError``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)


def _nonce() -> bytes:
    return bytes.fromhex(SYSTEM.token() + SYSTEM.token())


def _proof(secret: str, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), b"".join((who, *nonces)), "sha256")
