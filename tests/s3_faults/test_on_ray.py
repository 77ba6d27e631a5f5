"""The whole path with a ``Checkpointer`` on a Ray cluster: training neither hangs nor dies when the store fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3_faults.on_ray import TIMEOUT

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def test_training_continues_while_the_store_fails(s3_uri: str) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    program = [sys.executable, str(tests / "s3_faults" / "on_ray.py"), s3_uri]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])

    assert found["troubled"][1:] == [0, 0]
    for failed in (found["stalled"], *found["refused"], found["strict"]):
        assert "ranks [0] could not be stored: " in failed["error"]
        assert ".pack: the store has not taken it in time" in failed["error"]
        assert failed["seconds"] < TIMEOUT + 2
    assert found["stalled"]["failures"] == [1, 1]
    assert found["after"][1:] == [1, 0]
    assert [failed["failures"] for failed in found["refused"]] == [[2, 1], [3, 2], [4, 3]]
    assert found["too many"].startswith("3 saves in a row have failed, the last one: ")
    assert ".pack" in found["too many"]
    assert found["recovered"][1:] == [4, 0]
    assert found["closed after"] < TIMEOUT + 2
    assert found["raised"] == found["strict"]["error"]
    assert found["durable"] == [9, True]
    assert found["newest"] == [11, True]  # from the node's memory
    assert found["steps"] == [1, 2, 4, 9]
    for line in ("step 3 failed (1 in a row, 1 in total)", "step 7 failed (3 in a row, 4 in total)"):
        assert ended.stderr.count(line) == 1
