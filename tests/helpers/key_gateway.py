"""A gateway before an S3 server that accepts some access keys only, as a server does whose keys are rotated or expire; and the
services that issue them: the STS of moto, and the metadata service of a machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_REFUSAL = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_KEY = re.compile(r"Credential=([^/]+)/")
_ISSUED = re.compile(rb"<AccessKeyId>(\w+)</AccessKeyId>")
_METADATA = "/latest/"
_OWN = ("connection", "transfer-encoding", "content-length", "date", "server")


class KeyGateway:
    """Passes requests on that are signed with one of ``accepted``, or whose path is not ``guarded``; keys that are issued are
    accepted. ``seen``: the keys, by method and path of the request."""

    def __init__(self, server: str) -> None:
        self.accepted: set[str] = set()
        self.guarded, self._issued = "", 0
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
                if self.path.startswith(_METADATA):
                    self.answer(200, {}, gateway.metadata(self.path))
                    return
                issues = b"AssumeRoleWithWebIdentity" in body
                if key not in gateway.accepted and not issues and re.search(gateway.guarded, self.path):
                    self.answer(403, {"Content-Type": "application/xml"}, _REFUSAL)
                    return
                with contextlib.closing(http.client.HTTPConnection(upstream, timeout=60)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    data = answer.read()
                    gateway.accepted.update(found.decode() for found in _ISSUED.findall(data) if issues)
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

    def issue(self, seconds: float = 3600) -> dict[str, str]:
        """Make temporary keys that are accepted. ``seconds``: after which they end."""
        self._issued += 1
        self.accepted.add(key := f"temporary{self._issued}")
        end = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"AccessKeyId": key, "SecretAccessKey": f"secret-of-{key}", "Expiration": end}

    def metadata(self, path: str) -> bytes:
        """Answer as the metadata service of a machine with a role. Its keys end soon."""
        if path.endswith("/role"):
            keys = self.issue(60)
            return json.dumps(keys | {"Token": "token", "Code": "Success", "LastUpdated": keys["Expiration"]}).encode()
        return b"role" if "security-credentials" in path else b"token"

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
