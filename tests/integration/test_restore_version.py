"""All ranks of a cluster restore the version that they selected, or none restores any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers
from ray.exceptions import RayTaskError

import raystow
from integration.ranks import every, save_state, start
from raystow.storage.format import keys

SIZE = 10_000
"""Elements in each layer."""

pytestmark = pytest.mark.usefixtures("cluster")


def model(step: int) -> dict[str, Any]:
    return {"model": layers(step, SIZE), "step": step}


def run_of(folder: Path, *steps: int, **options: Any) -> list[Any]:
    """Start two ranks that save these steps; then their states are set to another step."""
    ranks = start(str(folder), 2, **options)
    for step in steps:
        save_state(ranks, step, model)
    every(ranks, "set", model, 0)
    return ranks


def restored_steps(ranks: list[Any]) -> list[int]:
    """Return the step of each rank's state, and assert that the whole state is of that step."""
    steps = []
    for state in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in layers(state["step"], SIZE).items())
        steps.append(state["step"])
    return steps


def errors_of(ranks: list[Any], *versions: Any) -> list[raystow.RaystowError]:
    """Return the error of each rank for its version."""
    found = []
    calls = [rank.restore.remote(version) for rank, version in zip(ranks, versions, strict=True)]
    for call in calls:
        with pytest.raises(RayTaskError) as caught:
            ray.get(call, timeout=120)
        found.append(caught.value.cause)
    return found


@pytest.mark.parametrize("cache", [None, 0])
@pytest.mark.long
def test_all_ranks_restore_the_selected_version(tmp_path: Path, cache: int | None) -> None:
    """The version is read from the nodes' memory, or from the store (``cache=0``)."""
    ranks = run_of(tmp_path, 10, 20, 30, memory=raystow.Memory() if cache is None else raystow.Memory(cache=cache))
    repository = raystow.open(tmp_path)
    repository.pin(repository.version(2), "best")
    for which, step in ((1, 10), ("best", 20), ("step:30", 30), (repository.version(2), 20), ("latest", 30)):
        restored = every(ranks, "restore", which)
        assert [version.step for version in restored] == [step, step]
        assert restored_steps(ranks) == [step, step]
        every(ranks, "set", model, 0)
    every(ranks, "restore", "step:10")
    save_state(ranks, 11, model)  # training continues from step 10
    assert [version.step for version in every(ranks, "restore")] == [11, 11]
    assert [version.step for version in repository.versions()] == [10, 20, 30, 11]


def test_ranks_that_select_different_versions_all_get_an_error(tmp_path: Path) -> None:
    ranks = run_of(tmp_path, 10, 20)
    for error in errors_of(ranks, "latest", 1):
        assert isinstance(error, raystow.StateError)
        assert "'latest' by ranks [0], '1' by ranks [1]" in str(error)
        assert "pass the same version on all ranks" in str(error)
    assert restored_steps(ranks) == [0, 0]
    assert [version.step for version in every(ranks, "restore", 1)] == [10, 10]  # the error does not affect the next restore


def test_a_missing_version_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    ranks = run_of(tmp_path, 10, 20)
    for error in errors_of(ranks, "step:15", "step:15"):
        assert isinstance(error, raystow.NotFound)
        assert "there is no version of step 15 (the newest versions are 1 (step 10), 2 (step 20)" in str(error)
    raystow.open(tmp_path).plan_retention(raystow.Policy(keep_last=1)).execute()
    for error in errors_of(ranks, 1, 1):
        assert isinstance(error, raystow.NotFound)
        assert "version 1 was dropped" in str(error)
    for error in errors_of(ranks, True, True):
        assert isinstance(error, raystow.StateError)
    assert restored_steps(ranks) == [0, 0]


def test_a_damaged_version_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """No other version is restored instead."""
    ranks = run_of(tmp_path, 10, 20, memory=raystow.Memory(cache=0))
    version = raystow.open(tmp_path).version("step:20")
    pack = next(tmp_path.joinpath(keys.prefix(version.id, version.attempt)).glob("*.pack"))
    pack.write_bytes(pack.read_bytes()[:-1])
    for error in errors_of(ranks, 2, 2):
        assert isinstance(error, raystow.Damaged)
        assert str(error).startswith("version 2 (step 20): ")
    assert [restored.step for restored in every(ranks, "restore", 1)] == [10, 10]
