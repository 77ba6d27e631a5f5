"""A TCP connection between two node workers: messages, each between its length and its seal, and raw bytes after some of them.

The handshake compares protocol versions, and both sides prove that they know the secret of the node that was called, which came
through Ray. The seal of a message is a keyed digest of it and of its number: so nobody on the path can change, add, leave out or
repeat messages. Raw bytes have no seal: their receiver compares them with a digest that came in a message or through Ray. The
called node worker may have a TLS certificate that the caller knows (``peer_tls.PEER_TLS``); without it, the traffic can be read
on the path. Every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer
from ...storage.runtime.clock import SYSTEM
from .messages import GREETING, Contact, Message, check_greeting, decode, encode
from .peer_tls import client_context

MAX_MESSAGE = 1 << 20
"""Bytes of a message; the raw bytes after it do not count."""

_Message = TypeVar("_Message", bound=Message)
_LENGTH, _NUMBER = struct.Struct("<I"), struct.Struct("<Q")
STALL = 15.0
"""Seconds within which some bytes must move."""

_TRANSFER = 60.0  # seconds within which all bytes after a message must be transferred
PROOF_SECONDS = 5.0  # within which a caller must have proved that it knows the secret
_BLOCK = 1 << 20  # bytes
_KEEPALIVE = (socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)  # detects a peer without power
_NONCE, _PROOF = 16, 32  # bytes


class TcpChannel:
    """One end of a connection.

    Every method raises ``OSError`` when the connection is broken (``TimeoutError`` if the peer may be alive but is too slow) and
    ``ProtocolError`` if the peer does not follow the protocol. The channel is unusable after either.
    """

    def __init__(self, peer: socket.socket, *, stall: float = STALL) -> None:
        self._socket, self._stall = peer, stall
        self._sent = self._received = _seals(b"")
        peer.settimeout(stall)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    def connect(contact: Contact, *, stall: float = STALL) -> TcpChannel:
        """Connect to the node worker that listens at ``contact``."""
        where = f"{contact.host}:{contact.port}"
        channel = TcpChannel(socket.create_connection((contact.host, contact.port), stall), stall=stall)
        try:
            if contact.certificate:
                channel._encrypt(client_context(contact.certificate), server=False)
            mine = _nonce()
            channel._send(GREETING + mine, stall)
            check_greeting(channel._exactly(len(GREETING)), where)
            theirs = channel._exactly(_NONCE)
            if not hmac.compare_digest(channel._exactly(_PROOF), _proof(contact.secret, b"answers", mine, theirs)):
                raise ConnectionRefusedError(f"{where} does not know the secret of the node worker")
            channel._send(_proof(contact.secret, b"calls", mine, theirs), stall)
            channel._sent, channel._received = _both_seals(contact.secret, mine, theirs)
        except BaseException:
            channel.close()
            raise
        return channel

    def accept(self, secret: str, context: ssl.SSLContext | None, *, within: float = PROOF_SECONDS) -> None:
        """Do the handshake of the side that was called, with TLS if it has a ``context``, within some seconds. Raises
        ``ConnectionRefusedError`` if the caller lacks the secret."""
        end = SYSTEM.monotonic() + within
        self._socket.settimeout(within)
        if context is not None:
            self._encrypt(context, server=True)
        self._send(GREETING, within)
        check_greeting(self._exactly(len(GREETING), end), "the caller")
        theirs, mine = self._exactly(_NONCE, end), _nonce()
        self._send(mine + _proof(secret, b"answers", theirs, mine), within)
        if not hmac.compare_digest(self._exactly(_PROOF, end), _proof(secret, b"calls", theirs, mine)):
            raise ConnectionRefusedError("the caller does not know the secret of this node worker")
        self._received, self._sent = _both_seals(secret, theirs, mine)
        self._socket.settimeout(self._stall)

    def send(self, message: Message) -> None:
        """Send a message."""
        body = encode(message, most=MAX_MESSAGE)
        self._send(_LENGTH.pack(len(body)) + body + self._sent(body), self._stall)

    def send_bytes(self, data: Buffer) -> None:
        """Send the raw bytes after a message."""
        self._send(data, _TRANSFER)

    def send_file(self, descriptor: int, start: int, length: int) -> None:
        """Send the raw bytes after a message from a file; without TLS, without copying them."""
        if not isinstance(self._socket, ssl.SSLSocket):
            with open(descriptor, "rb", closefd=False) as file:
                if self._socket.sendfile(file, start, length) != length:
                    raise ConnectionError("the file ended")
            return
        end, block = SYSTEM.monotonic() + _TRANSFER, memoryview(bytearray(min(length, _BLOCK)))
        while length:
            count = os.preadv(descriptor, [block[:length]], start)
            if not count:
                raise ConnectionError("the file ended")
            self._send(block[:count], end - SYSTEM.monotonic())
            start, length = start + count, length - count

    def receive(self, *expected: type[_Message], timeout: float | None = STALL) -> _Message:
        """Return the next message, of one of these classes, which must begin within ``timeout`` seconds."""
        self._socket.settimeout(timeout)
        with _broken():
            head = self._socket.recv(_LENGTH.size)
        self._socket.settimeout(self._stall)
        if not head:
            raise ConnectionError("the peer closed the connection")
        (length,) = _LENGTH.unpack(head + self._exactly(_LENGTH.size - len(head)))
        if length > MAX_MESSAGE:
            raise ProtocolError(f"a message of {length} bytes exceeds {MAX_MESSAGE}")
        body = self._exactly(length)
        if not hmac.compare_digest(self._exactly(_PROOF), self._received(body)):
            raise ConnectionAbortedError("a message was changed on its way")
        return decode(body, *expected)

    def receive_into(self, target: memoryview) -> None:
        """Receive the raw bytes after a message."""
        self._fill(target, SYSTEM.monotonic() + _TRANSFER)

    def shut(self) -> None:
        """End the connection: a thread that uses it gets a ``ConnectionError``, and closes it. Nobody else may: OpenSSL would
        write that thread's last alert to whatever connection has the descriptor's number by then."""
        with contextlib.suppress(OSError):
            # Not that of ``SSLSocket``, after which another thread would send without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which no other thread uses."""
        self.shut()
        self._socket.close()

    def _encrypt(self, context: ssl.SSLContext, *, server: bool) -> None:
        with _broken():
            # Not while it is wrapped: ``close`` could not end a handshake then.
            self._socket = encrypted = context.wrap_socket(self._socket, server_side=server, do_handshake_on_connect=False)
            encrypted.do_handshake()

    def _send(self, data: Buffer, seconds: float) -> None:
        end, left = SYSTEM.monotonic() + seconds, memoryview(data).cast("B")
        with _broken():
            while left:
                if SYSTEM.monotonic() > end:
                    raise TimeoutError(f"{left.nbytes} bytes were not sent in time")
                left = left[self._socket.send(left[:_BLOCK]) :]

    def _fill(self, target: memoryview, end: float) -> None:
        got = 0
        with _broken():
            while got < target.nbytes:
                if SYSTEM.monotonic() > end:
                    raise TimeoutError(f"{target.nbytes - got} bytes did not come in time")
                part = self._socket.recv_into(target[got:])
                if not part:
                    raise ConnectionError("the peer closed the connection")
                got += part

    def _exactly(self, length: int, end: float | None = None) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data), SYSTEM.monotonic() + _TRANSFER if end is None else end)
        return bytes(data)


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Raise ``ConnectionError`` for what TLS finds: a certificate of another worker, changed bytes, an end without notice."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionAbortedError(f"TLS: {error.reason or error}") from error


def _nonce() -> bytes:
    return bytes.fromhex(SYSTEM.token() + SYSTEM.token())


def _seals(key: bytes) -> Callable[[bytes], bytes]:
    """What makes the seals of all messages of one direction of a connection, in order."""
    numbers = itertools.count(1)
    return lambda body: hmac.digest(key, _NUMBER.pack(next(numbers)) + body, "sha256")


def _both_seals(secret: str, *nonces: bytes) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """Those of the caller's messages, and those of the answers."""
    return _seals(_proof(secret, b"sealed calls", *nonces)), _seals(_proof(secret, b"sealed answers", *nonces))


def _proof(secret: str, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), b"".join((who, *nonces)), "sha256")
