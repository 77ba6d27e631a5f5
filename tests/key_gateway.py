"""A gateway before an S3 server that accepts some access keys only, as a server does whose keys are rotated or expire."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_REFUSAL = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_KEY = re.compile(r"Credential=([^/]+)/")
_OWN = ("connection", "transfer-encoding", "content-length", "date", "server")


class KeyGateway:
    """Passes requests on that are signed with one of ``accepted``; ``seen`` are the keys by method and path of the request."""

    def __init__(self, server: str) -> None:
        self.accepted: set[str] = set()
        self.seen: list[tuple[str, str, str]] = []
        upstream, gateway = urlsplit(server).netloc, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found = _KEY.search(self.headers.get("Authorization", ""))
                key = found.group(1) if found else ""
                gateway.seen.append((self.command, self.path, key))
                if key not in gateway.accepted:
                    self.answer(403, {"Content-Type": "application/xml"}, _REFUSAL)
                    return
                with contextlib.closing(http.client.HTTPConnection(upstream, timeout=60)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    data = answer.read()
                    size = {"Content-Length": answer.headers["Content-Length"]} if self.command == "HEAD" else {}
                    self.answer(answer.status, dict(answer.headers) | size, data)

            def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.send_header("Content-Length", headers["Content-Length"] if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def keys_of(self, method: str, path: str) -> set[str]:
        """The keys of the requests so far whose path matches."""
        return {key for sent, at, key in self.seen if sent == method and re.search(path, at)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def key_gateway(server: str, *accepted: str) -> Iterator[KeyGateway]:
    """A gateway until the ``with`` block ends."""
    with contextlib.closing(KeyGateway(server)) as gateway:
        gateway.accepted.update(accepted)
        yield gateway
