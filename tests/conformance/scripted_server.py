"""A server that answers each request with the next answer of a script, and the store operations that tests send to it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from raystow.storage.errors import RaystowError
from raystow.storage.object_store import ObjectStore

SECRET, TOKEN = "wJalrXUtnFEMI/K7MDENG", "FwoGZXIvYXdzEXAMPLETOKEN"


class Scripted(ThreadingHTTPServer):
    """A server that answers with the next (status, code) of a script; the last one repeats, "stall" never answers."""

    daemon_threads = True

    def __init__(self, script: Sequence[tuple[int, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.requests, self.closing = list(script), [], threading.Event()  # type: ignore[var-annotated]

    @contextmanager
    def running(self) -> Iterator[Scripted]:
        """Serve until the ``with`` block ends."""
        with self:
            threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
            yield self
            self.closing.set()
            self.shutdown()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        server: Any = self.server
        server.requests.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, code = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        if code == "stall":
            server.closing.wait()
            return
        # Real servers do so: the answer to an invalid signature repeats the request, including the session token.
        echo = "".join(f"{name}:{value}\n" for name, value in self.headers.items())
        body = f"<Error><Code>{code}</Code><Message>{SECRET} {TOKEN}</Message><CanonicalRequest>{echo}</CanonicalRequest></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *args: Any) -> None:
        pass


def operations(store: ObjectStore) -> dict[str, Any]:
    return {
        "get": lambda: store.get("k", max_bytes=9),
        "get_range": lambda: store.get_range("k", 0, 9),
        "get_range empty": lambda: store.get_range("k", 0, 0),
        "put": lambda: store.put("k", [b"x"]),
        "put large": lambda: store.put("k", [bytes(17 << 20)]),
        "put_if": lambda: store.put_if("k", b"x", None),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(["k"]),
    }


def failures(store: ObjectStore) -> dict[str, RaystowError]:
    """Return the error of each operation; each must raise, name the store, and contain no secret."""
    found = {}
    for name, operation in operations(store).items():
        with pytest.raises(RaystowError) as caught:
            operation()
        found[name] = caught.value
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert store.uri in str(caught.value)
        assert SECRET not in shown
        assert TOKEN not in shown
    return found
