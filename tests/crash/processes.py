"""The processes of a trial: they are forked in milliseconds, exchange messages with the harness, and can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash.tripwire import Message

_REQUEST = 1 << 16
_MESSAGE = 1 << 20


class Zygote:
    """The process that forks all others."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self._line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(here.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(here / "zygote.py"), str(end.fileno())],
            pass_fds=[end.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        )
        end.close()
        if self._line.recv(_REQUEST) != b"ready":
            raise RuntimeError("the zygote did not start")

    def fork(self, request: Message, control: socket.socket, log: int) -> int:
        """Start a process, and return its id."""
        socket.send_fds(self._line, [json.dumps(request).encode()], [control.fileno(), log])
        return int(json.loads(self._line.recv(_REQUEST)))

    def close(self) -> None:
        self._line.close()
        self._process.wait()


@dataclass
class Proc:
    """A process. ``ready``: its message when it was ready; ``said``: its other messages, by kind."""

    name: str
    pid: int
    control: socket.socket
    ready: Message | None = None
    said: dict[str, list[Any]] = field(default_factory=dict)
    doomed: bool = False

    def tell(self, **message: Any) -> None:
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:
            pass  # it has died, and ``until`` will read that

    @property
    def stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def hear(self) -> bytes:
        """Return its next message, or nothing if it has ended."""
        try:
            return self.control.recv(_MESSAGE)
        except ConnectionResetError:
            return b""  # killed before it read its messages

    def note(self, message: Message) -> None:
        """Store a message."""
        for kind, value in message.items():
            self.said.setdefault(kind, []).append(value)

    def kill(self) -> None:
        self.doomed = True
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass
