"""Run commands of raystow in processes of their own, one after the other, with outputs that take nothing or no terminal.

``python command_processes.py`` reads a list of command lines with outputs as JSON, forks a process for each, and prints the
exit status and stderr of each as JSON. A fork saves the imports; the process ends as that of a command does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FULL, CLOSED = "full disk", "closed by its reader"


@dataclass(frozen=True)
class Ended:
    """How a command ended; ``code`` is negative for a signal, as in ``subprocess``."""

    code: int
    errors: str


def ended(commands: list[list[str]], output: str) -> list[Ended]:
    """Run commands whose stdout is ``output``, and return how each ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": "127.0.0.1:1"}
    words, given = [sys.executable, __file__], json.dumps([commands, output])
    run = subprocess.run(words, env=environment, input=given, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return [Ended(**one) for one in json.loads(run.stdout)]


def _in_child(output: str, errors: int) -> None:
    if output == FULL:
        sink = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, sink = os.pipe()
        os.close(reader)
    os.dup2(sink, 1)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _without_cluster() -> None:
    """Let the commands that need Ray find a cluster, so that they reach what they print."""
    from raystow.demo import process
    from raystow.orchestrator import ray_cluster
    from raystow.orchestrator.coordinator import cluster_probe
    from raystow.orchestrator.coordinator.status import ClusterStatus
    from raystow.workers.node import actor
    from raystow.workers.protocol.messages import CoordinatorStatus

    @contextlib.contextmanager
    def cluster_process(*_: object) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["true"]) as ended:
            yield ended

    class Probe:
        def __init__(self, address: str) -> None: ...

        def look(self) -> ClusterStatus:
            return ClusterStatus(1.0, {"coordinator-1": CoordinatorStatus("s3://b/run", "r" * 16, 1, None, 0.0, 0, (), ())}, {})

    process.cluster_process = cluster_process
    cluster_probe.ClusterProbe = Probe  # type: ignore
    ray_cluster.connect = lambda: type("Connection", (), {"node": "n"})  # type: ignore
    ray_cluster.announce_end = lambda *_: None
    actor.saves_on = lambda _: None


def main() -> None:
    from typer.testing import CliRunner

    from raystow.cli import app

    commands, output = json.load(sys.stdin)
    CliRunner().invoke(app.build(), ["verify", str(Path(__file__).parent)])  # imports what most commands need
    found = []
    for words in commands:
        errors = os.memfd_create("errors")
        child = os.fork()
        if not child:
            _in_child(output, errors)
            if words[0] in ("demo", "top", "drain"):
                _without_cluster()
            sys.argv = ["raystow", *words]
            app.main()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append({"code": code, "errors": Path(f"/proc/self/fd/{errors}").read_text()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
