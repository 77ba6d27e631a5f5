"""A malformed S3 server: it answers every request with one invalid behavior until its ``with`` block ends."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BLOCK = b"x" * 65536
OK = b"HTTP/1.1 200 OK\r\n"
DATE = b"Last-Modified: Tue, 24 Nov 2026 00:00:00 GMT\r\n"
TAGGED = b'ETag: "0123"\r\n' + DATE
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/1000\r\n" + TAGGED
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 400 Bad Request\r\n"

Answer = Iterator[bytes]
Behavior = Callable[["Connection"], Answer]


class Connection:
    """The request to answer. ``gone`` is set when the server stops."""

    def __init__(self, head: bytes, gone: threading.Event) -> None:
        self.ranged = b"\r\nrange:" in head.lower()
        self.listing = b"list-type=2" in head
        self.gone = gone

    def endless(self, *, chunked: bool = False, pause: float = 0.0) -> Answer:
        """Yield bytes without an end."""
        while not self.gone.wait(pause):
            yield b"10000\r\n" + BLOCK + b"\r\n" if chunked else BLOCK

    def drip(self, data: bytes = b"x") -> Answer:
        """Yield one byte every 0.05 s without an end: each byte resets a time-out that counts from the last byte."""
        while not self.gone.wait(0.05):
            yield data

    @property
    def first_line(self) -> bytes:
        """The status line and headers of a correct answer."""
        return PART if self.ranged else OK + TAGGED


def of(*parts: bytes) -> Behavior:
    """Return a behavior with one fixed answer; the connection is closed after it."""
    return lambda connection: iter(parts)


def xml(body: bytes) -> Behavior:
    return of(OK + b"Content-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(body), body)


def _entry(key: bytes, size: bytes = b"1", date: bytes = b"2026-11-24T00:00:00Z") -> bytes:
    return b"<Contents><Key>%s</Key><Size>%s</Size><LastModified>%s</LastModified></Contents>" % (key, size, date)


def _page(*entries: bytes, more: bytes = b"") -> bytes:
    return b"<ListBucketResult>" + b"".join(entries) + more + b"</ListBucketResult>"


MORE = b"<IsTruncated>true</IsTruncated><NextContinuationToken>%d</NextContinuationToken>"


def _same_page_for_ever() -> Behavior:
    tokens = iter(range(1 << 30))

    def answer(connection: Connection) -> Answer:
        return xml(_page(_entry(b"run/a"), more=MORE % next(tokens)))(connection)

    return answer


def _head_and(head: Callable[[Connection], bytes], body: Callable[[Connection], Answer]) -> Behavior:
    def answer(connection: Connection) -> Answer:
        yield head(connection)
        yield from body(connection)

    return answer


BEHAVIORS: dict[str, Callable[[], Behavior]] = {
    "closes_at_once": lambda: of(b""),
    "no_http": lambda: of(b"\x00\xff" * 4096),
    "says_nothing": lambda: _head_and(lambda c: b"", lambda c: iter([b""] if c.gone.wait(60) else [])),
    "drips_its_first_line": lambda: _head_and(lambda c: b"HTTP/1.1 200 ", lambda c: c.drip(b"K")),
    "drips_headers": lambda: _head_and(lambda c: OK, lambda c: c.drip(b"A: b\r\n")),
    "endless_header": lambda: _head_and(lambda c: OK + b"A: ", lambda c: c.endless()),
    "drips_its_body": lambda: _head_and(lambda c: c.first_line + b"Content-Length: 100\r\n\r\n", lambda c: c.drip()),
    "stalls_in_its_body": lambda: _head_and(
        lambda c: c.first_line + b"Content-Length: 100\r\n\r\nxx", lambda c: iter([b""] if c.gone.wait(60) else [])
    ),
    "endless_body": lambda: _head_and(lambda c: c.first_line + b"\r\n", lambda c: c.endless()),
    "endless_chunked_body": lambda: _head_and(lambda c: c.first_line + CHUNKED, lambda c: c.endless(chunked=True)),
    "body_larger_than_any": lambda: _head_and(
        lambda c: c.first_line + b"Content-Length: 99999999999999\r\n\r\n", lambda c: c.endless()
    ),
    "cuts_its_body": lambda: _head_and(lambda c: c.first_line + b"Content-Length: 100\r\n\r\n", lambda c: iter([b"short"])),
    "length_is_no_number": lambda: _head_and(lambda c: c.first_line + b"Content-Length: many\r\n\r\n", lambda c: iter([b"x"])),
    "length_is_negative": lambda: _head_and(lambda c: c.first_line + b"Content-Length: -5\r\n\r\n", lambda c: iter([b"x"])),
    "no_tag": lambda: of(OK + DATE + b"Content-Length: 2\r\n\r\n", b"{}"),
    "wrong_range": lambda: of(
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-104/1000\r\n" + TAGGED + b"Content-Length: 100\r\n\r\n",
        b"x" * 100,
    ),
    "no_range": lambda: of(OK + b"Content-Length: 1000\r\n\r\n", b"x" * 1000),
    # 100 MB/s, so that what arrives between two looks at the memory is small.
    "endless_error": lambda: _head_and(lambda c: ERROR + b"\r\n", lambda c: c.endless(pause=0.0005)),
    "error_without_xml": lambda: of(ERROR + b"Content-Length: 9\r\n\r\n", b"<Error><C"),
    "redirects_for_ever": lambda: of(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
    "no_list": lambda: xml(b"<ListBucketResult><Contents/></ListBucketResult>"),
    "size_is_no_number": lambda: xml(_page(_entry(b"run/a", size=b"one"))),
    "time_is_none": lambda: xml(_page(_entry(b"run/a", date=b"yesterday"))),
    "keys_out_of_order": lambda: xml(_page(_entry(b"run/b"), _entry(b"run/a"))),
    "same_page_for_ever": _same_page_for_ever,
}
ONLY = {
    **dict.fromkeys(("no_list", "size_is_no_number", "time_is_none", "keys_out_of_order", "same_page_for_ever"), "list"),
    **dict.fromkeys(("wrong_range", "no_range"), "get_range"),
}
"""Behaviors that are invalid for one operation only, and that operation."""


class HostileServer:
    """A server on a free local port. ``behavior`` answers every request from the assignment on."""

    def __init__(self) -> None:
        self.behavior: Behavior = of(b"")
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve until the ``with`` block ends; yield the address."""
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    outer.answer(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, block_on_close, allow_reuse_address = True, False, True

        with Server(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                self._over.set()
                server.shutdown()

    def answer(self, client: socket.socket) -> None:
        client.settimeout(30)
        head = b""
        while b"\r\n\r\n" not in head:
            if not (part := client.recv(65536)):
                return
            head += part
        for data in self.behavior(Connection(head, self._over)):
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        client.recv(65536)  # a close with unread data would discard the answer that was sent
