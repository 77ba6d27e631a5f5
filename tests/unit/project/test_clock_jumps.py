"""Saves, retention, and collection while the wall clock of the process jumps by days. The test needs libfaketime (on Debian:
``apt install libfaketime``).
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")

SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from helpers.local_cluster import LocalCluster
from raystow import Policy

folder, clock = Path(sys.argv[1]), Path(sys.argv[2])
real = time.time()
with LocalCluster(str(folder)) as cluster:
    for step, jump in enumerate(["+0", "+2d", "-2d", "+400d", "-1d", "+0"]):
        clock.write_text(jump)
        version = cluster.save({"w": np.full(1000, step)}, step=step, timeout=30)
        assert (version.read("w") == step).all()
        cluster.repository.plan_retention(Policy(keep_last=2)).execute()
        done = cluster.repository.plan_collection(dropped_only=True).execute()
        assert done.objects == 0, f"deleted within the hour of grace: {done}"
    clock.write_text("+2d")
    assert time.time() > real + 86400, "the clock is not faked"
    assert [version.step for version in cluster.repository.versions()] == [4, 5]
    with cluster.repository.lease(cluster.repository.latest()):
        assert cluster.repository.leased()
    for version in cluster.repository.versions():
        cluster.repository.verify(version)
print("whole")
"""


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime")
def test_saves_survive_jumps_of_the_clock(tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("+0")
    faked = {
        "LD_PRELOAD": LIBRARIES[0],
        "FAKETIME_TIMESTAMP_FILE": str(tmp_path / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join(["tests", ".", os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "clock")]
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, **faked}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "whole\n"), ended.stderr[-3000:]
