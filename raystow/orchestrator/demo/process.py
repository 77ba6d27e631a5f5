"""Runs the demo's cluster in a process, and kills all its descendants at the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextlib.contextmanager
def cluster_process(config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``demo.run`` with a configuration; on exit, kill it and all its descendants.

    It has its own session, so that Ctrl-C reaches only the caller, which then kills the whole cluster. The caller becomes the
    parent of orphans (a subreaper): processes that Ray's dead processes have started stay its descendants and are found.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(config["folder"])
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "raystow.orchestrator.demo.run", str(folder / "config.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        while family := psutil.Process().children(recursive=True):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=5)
        process.wait()
