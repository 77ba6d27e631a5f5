"""An S3 server that refuses some requests, as other products than AWS do: moto behind a proxy."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

Refusal = tuple[int, str]
Policy = Callable[[str, str, Mapping[str, str]], Refusal | None]
"""Returns HTTP status and error code for a request (method, path with query, headers) that is refused, else None."""


class PickyS3(ThreadingHTTPServer):
    """``refused``: the requests that were refused."""

    daemon_threads = True

    def __init__(self, backend: str, policy: Policy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend, self.policy, self.refused = urlsplit(backend).netloc, policy, list[str]()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        server: Any = self.server
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._chunks() if "chunked" in headers.get("transfer-encoding", "") else self.rfile.read(self._length(headers))
        if (refusal := server.policy(self.command, self.path, headers)) is not None:
            server.refused.append(f"{self.command} {self.path}")
            self._send(refusal[0], {}, f"<Error><Code>{refusal[1]}</Code></Error>".encode())
            return
        connection = http.client.HTTPConnection(server.backend)
        passed = {name: value for name, value in headers.items() if name not in ("transfer-encoding", "content-length")}
        connection.request(self.command, self.path, body, passed)
        answer = connection.getresponse()
        data = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in ("content-length", "connection")}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        connection.close()
        self._send(answer.status, kept, data, length)

    def _length(self, headers: Mapping[str, str]) -> int:
        return int(headers.get("content-length", 0))

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, headers: dict[str, str], body: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def picky_s3(backend: str, policy: Policy) -> Iterator[PickyS3]:
    """Start the server; this process's variables refer to it until the ``with`` block ends."""
    with PickyS3(backend, policy) as server, pytest.MonkeyPatch.context() as environment:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()
