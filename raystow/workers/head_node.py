"""Whether the head node of a Ray cluster answers. Asks its port directly: Ray's own calls wait for a dead one without end, and
Python handles no signal meanwhile."""

from __future__ import annotations

import os
import socket

ANSWER_TIMEOUT = 5.0  # seconds to connect, and then to answer
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty settings: RFC 9113, 3.4 and 6.5
_SETTINGS = bytes((4,))  # the type of the frame that a server sends first


def listens(address: str) -> bool:
    """Return whether the machine at ``address`` accepts connections to the head node, also for one that is frozen."""
    try:
        _connected(address).close()
    except OSError:
        return False
    return True


def reach(address: str) -> None:
    """Raise ``ConnectionError`` unless Ray's head node answers at ``address``, a host and a port."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConnectionError(f"{address!r} is not the address of a head node, host:port")
    try:
        with _connected(address) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # without its certificates, nothing more can be said
            connection.sendall(_PREFACE)
            frame = b""
            while len(frame) < 4 and (part := connection.recv(4 - len(frame))):
                frame += part
    except OSError as error:
        raise ConnectionError(f"the head node does not answer at {address}: {error}") from error
    if frame[3:] != _SETTINGS:
        raise ConnectionError(f"{address} is the address of something else than a head node of Ray")


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_TIMEOUT)
