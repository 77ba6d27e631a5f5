"""Forks the processes of a trial in milliseconds: it has imported and compiled everything, and has never started a thread.

    python zygote.py FD

It reads requests from the socket FD, each with the control socket and the log file of a new process, and answers with the id of
the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback

import pyarrow.parquet  # noqa: F401
import ray  # noqa: F401

import raystow.cli.app
from crash.process_roles import play
from raystow.storage.versions.version import Version
from raystow.workers.packing.chunk_writer import warm_up

with contextlib.suppress(ImportError):
    import pandas  # noqa: F401  pyarrow looks for it at its first use

_REQUEST = 1 << 16  # bytes
_HEAVY = (raystow.cli.app, Version)


def main() -> None:
    """Serve until the harness closes the socket."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    raystow.cli.app.build()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped at once; the control socket reports their end
    gc.collect()
    gc.freeze()
    requests.send(b"ready")
    while True:
        request, files, _, _ = socket.recv_fds(requests, _REQUEST, 2)
        if not request:
            return
        child = os.fork()
        if not child:
            requests.close()
            _become(json.loads(request), *files)
        for file in files:
            os.close(file)
        requests.send(json.dumps(child).encode())


def _become(request: dict[str, object], control: int, log: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        play(request, socket.socket(fileno=control))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
