"""An attacker on the line between two node workers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from raystow.workers.protocol.messages import Contact

Change = Callable[[bytes], bytes]


class PeerPath:
    """A proxy between a caller and the server at ``contact``. ``change`` is applied to the data from the server,
    ``change_call`` to the data to it."""

    def __init__(self, contact: Contact) -> None:
        self._server = contact
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.contact = replace(contact, port=self._socket.getsockname()[1])
        self.seen = bytearray()
        self.change: Change = lambda data: data
        self.change_call: Change = lambda data: data
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller = self._socket.accept()[0]
                server = socket.create_connection((self._server.host, self._server.port))
                for source, target, change in ((caller, server, self._changed_call), (server, caller, self._changed)):
                    threading.Thread(target=self._pump, args=(source, target, change), daemon=True).start()

    def _changed(self, data: bytes) -> bytes:
        return self.change(data)

    def _changed_call(self, data: bytes) -> bytes:
        return self.change_call(data)

    def _pump(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                target.sendall(change(data))
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
