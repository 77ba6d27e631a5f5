"""The sources of the rank and the world size. Contradictory sources are refused with an error that lists all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from raystow.orchestrator.client.rank_discovery import Placement, placement
from raystow.storage.errors import StateError


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for module in ("ray.train", "torch.distributed"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def environment(monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)


def train(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world_size)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))


def test_a_single_process_is_rank_0_of_1() -> None:
    assert placement() == Placement(0, 1)


def test_the_environment_is_used_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "2", "4")
    assert placement() == Placement(2, 4)
    assert placement(2, 4) == Placement(2, 4)


def test_a_task_of_slurm_has_its_rank_if_nothing_else_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script and an allocation are no tasks of a step; in workers of Ray, the step is that of the raylet."""
    for name, value in (("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8")):
        monkeypatch.setenv(name, value)
    assert placement() == Placement(0, 1)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert placement() == Placement(3, 8)
    environment(monkeypatch, "1", "2")
    assert placement() == Placement(1, 2)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    worker = SimpleNamespace(global_worker=SimpleNamespace(mode=1))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(_private=SimpleNamespace(worker=worker), WORKER_MODE=1))
    assert placement() == Placement(0, 1)


@pytest.mark.parametrize("given", [{"rank": 1}, {"world_size": 2}])
def test_a_rank_without_a_world_size_is_refused(given: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "1", "2")
    with pytest.raises(StateError, match="is given without"):
        placement(**given)


def test_a_contradiction_names_all_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "3", "4")
    train(monkeypatch, 1, 2)
    output = "the arguments: rank 0 of 2; Ray Train: rank 1 of 2; torch.distributed: none; RANK and WORLD_SIZE: rank 3 of 4"
    with pytest.raises(StateError, match=re.escape(output)):
        placement(0, 2)


def test_consistent_sources_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "1", "2")
    train(monkeypatch, 1, 2)
    assert placement() == Placement(1, 2)


@pytest.mark.parametrize(("rank", "world_size"), [("1", "x"), ("", "2"), ("4", "4"), ("-1", "2")])
def test_an_invalid_environment_is_refused(rank: str, world_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, rank, world_size)
    with pytest.raises(StateError):
        placement()


GROUP = """
import sys
import torch.distributed as dist
from raystow.orchestrator.client.rank_discovery import placement
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(*placement(*map(int, sys.argv[1:])))
"""


def in_a_group(rank: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GROUP, *arguments],
        env=os.environ | {"RANK": rank, "WORLD_SIZE": str(1 + int(rank))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("rank", "code"), [("0", 0), ("1", 1)])
def test_a_process_group_must_agree_with_the_environment(rank: str, code: int) -> None:
    output = in_a_group(rank)
    assert output.returncode == code
    assert output.stdout == ("0 1\n" if code == 0 else "")
    assert ("contradictory ranks" in output.stderr) == bool(code)


def test_arguments_of_the_process_group_are_used() -> None:
    """A replica group of torchft under Ray Train, which sets RANK and WORLD_SIZE to those of all groups."""
    assert in_a_group("1", "0", "1").stdout == "0 1\n"
    assert "contradictory ranks" in in_a_group("1", "1", "3").stderr
