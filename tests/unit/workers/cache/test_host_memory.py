"""The memory that a process may use: the limits of all control groups around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raystow.workers.cache.host_memory import memory_limit

LIMIT = 100 << 20
SLURM = "system.slice/slurmstepd.scope/job_7/step_0"


@pytest.mark.parametrize(
    ("own", "where"),
    [
        ("0::/", ""),
        (f"0::/{SLURM}", SLURM),
        (f"0::/{SLURM}/user/task_0", SLURM),
        ("9:name=systemd:/\n4:memory:/slurm/job_7", "memory/slurm/job_7"),
        ("4:memory:/docker/0123", "memory"),  # a container without a namespace of its own
        ("0::/../other", ""),
    ],
)
def test_the_limit_is_that_of_the_tightest_group(own: str, where: str, tmp_path: Path) -> None:
    (folder := tmp_path / where).mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if "memory" in where else "memory.max")).write_text(f"{LIMIT}\n")
    (tmp_path / "own").write_text(own + "\n")
    assert memory_limit(tmp_path, tmp_path / "own") == LIMIT
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.limit_in_bytes").write_text(f"{1 << 63}\n")
    assert memory_limit(tmp_path, tmp_path / "own") > 2 * LIMIT
