"""Runs the demo's cluster in a process, and kills all its descendants at the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from .settings import DemoSettings

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextlib.contextmanager
def cluster_process(settings: DemoSettings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``demo.run`` with its output in ``log``; on exit, kill it and all its descendants.

    It has its own session, so that Ctrl-C reaches only the caller, which then kills the whole cluster. The caller becomes the
    parent of orphans (a subreaper): processes that Ray's dead processes have started stay its descendants and are found.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "raystow.demo.run", json.dumps(asdict(settings))],
            stdout=output,
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
