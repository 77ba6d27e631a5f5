"""A local stub of the Hugging Face Hub: the endpoints that its client's ``create_repo`` and ``upload_folder`` use, without
Xet."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"


@dataclass
class Hub:
    """The data that the server has received. ``files``: of the only repository, by path; .safetensors files are uploaded by
    LFS."""

    endpoint: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    commits: bool = True
    """Whether it accepts commits."""


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the server on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self._answer({"error": "Invalid username or password."}, 401)
            elif self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self._answer({"url": f"{hub.endpoint}/org/tiny", "name": "org/tiny"})
            elif self.path == "/api/models/org/tiny/preupload/main":
                modes = [
                    {**file, "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self._answer({"files": modes})
            elif self.path == "/org/tiny.git/info/lfs/objects/batch":
                self._answer({"transfer": "basic", "objects": [self._place(one) for one in json.loads(body)["objects"]]})
            elif self.path == "/api/models/org/tiny/commit/main":
                if not hub.commits:
                    self._answer({"error": "Storage limit reached."}, 403)
                    return
                self._commit([json.loads(line) for line in body.splitlines()])
            else:
                self._answer({"error": self.path}, 404)

        def do_PUT(self) -> None:
            hub.objects[self.path.removeprefix("/objects/")] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({})

        def do_GET(self) -> None:
            if self.path.startswith("/api/models/org/tiny/tree/main"):
                self._answer([{"type": "file", "path": p, "size": len(data), "oid": "0"} for p, data in hub.files.items()])
            else:
                self._answer({"error": self.path}, 404)

        def _place(self, one: dict[str, Any]) -> dict[str, Any]:
            href = f"{hub.endpoint}/objects/{one['oid']}"
            return {**one, "actions": {"upload": {"href": href, "header": {}}}}

        def _commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del hub.files[value["path"]]
                else:
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            self._answer({"commitUrl": f"{hub.endpoint}/org/tiny/commit/1", "commitOid": "1", "success": True})

        def _answer(self, content: Any, status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
