"""What a node worker does for the others: it listens, sends ranges of what it has in memory, keeps copies, and has a desk."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Any

from ...storage.clock import SYSTEM
from ...storage.errors import DeadlineExceeded
from ..fetching.fetcher import Fetcher
from ..memory.memory_tier import Home
from .copies import Copy, Guests
from .line import Contact, Line, Message

logger = logging.getLogger(__name__)

_CALLERS = 1024  # conversations at a time, each on a thread
_WAIT = 5.0  # seconds after which a caller hears that its bytes are still on their way
_PAUSE = 0.1  # seconds, if the caller hung up at once or this process has too many files open
_MAX_COPY = 1 << 30  # bytes of an object that is kept for another node


class Exchange:
    """Listens at ``host``, an address of this node, until ``close``."""

    def __init__(self, host: str, fetcher: Fetcher, guests: Guests) -> None:
        self._fetcher, self._guests = fetcher, guests
        self._lines = set[Line]()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        secret = "".join(SYSTEM.token() for _ in range(4))
        self.contact = Contact(host, self._socket.getsockname()[1], secret)
        threading.Thread(target=self._accept, name="raystow-exchange", daemon=True).start()

    def close(self) -> None:
        """Take no more calls, and end those that there are."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for line in list(self._lines):
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                line = Line(self._socket.accept()[0])
            except OSError:
                if self._socket.fileno() < 0:
                    return
                SYSTEM.sleep(_PAUSE)
                continue
            self._lines.add(line)
            if len(self._lines) <= _CALLERS:
                threading.Thread(target=self._serve, args=(line,), name="raystow-peer", daemon=True).start()
            else:
                self._hang_up(line)  # the caller reads from the store

    def _serve(self, line: Line) -> None:
        try:
            line.answer(self.contact.secret)
            while True:
                self._answer(line, line.receive(patience=None))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("a conversation with another node has ended: %r", error)
        finally:
            self._hang_up(line)

    def _hang_up(self, line: Line) -> None:
        line.close()
        self._lines.discard(line)

    def _answer(self, line: Line, asked: Message) -> None:
        if asked["what"] == "read":
            self._send(line, asked)
        elif asked["what"] == "claim":
            span, claims = (asked["start"], asked["end"]), self._fetcher.claims
            line.send({"claims": claims.claim(asked["round"], asked["key"], span, asked["node"], lost=asked["lost"])})
        elif asked["what"] == "accept":
            data = bytearray(min(asked["length"], _MAX_COPY))
            line.fill(memoryview(data))
            part = self._guests.accept(copy_of(asked), data)
            line.send({"part": vars(part)})

    def _send(self, line: Line, asked: Message) -> None:
        start, length = asked["start"], asked["length"]
        try:
            descriptor = self._fetcher.lend(asked["repository"], asked["key"], (start, start + length), _WAIT)
        except DeadlineExceeded:
            line.send({"found": "coming"})
            return
        if descriptor is None:
            line.send({"found": "nothing"})
            return
        try:
            line.send({"found": "here"})
            line.send_file(descriptor, start, length)
        finally:
            os.close(descriptor)


def copy_of(asked: dict[str, Any]) -> Copy:
    """An object for this node, as it was announced."""
    base = asked["base"] and Home(*asked["base"])
    return Copy(Home(*asked["home"]), asked["number"], asked["key"], tuple(asked["line"]), tuple(asked["after"]), base)
