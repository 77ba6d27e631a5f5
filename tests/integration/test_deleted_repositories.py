"""A repository that is deleted or replaced while its coordinator and node workers live: saves say so, and a new training begins
anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers

import raystow
from integration.ranks import every, save_state, start, take
from raystow.storage.checks.repair import plan_repair
from raystow.storage.format import keys
from raystow.storage.stores import open_store

pytestmark = pytest.mark.usefixtures("cluster")

SIZE = 100_000


def saved(folder: Path, **options: Any) -> list[Any]:
    """Return the ranks of a training that has saved steps 1 and 2."""
    ranks = start(str(folder), 2, **options)
    for step in (1, 2):
        save_state(ranks, step, layers, SIZE)
    return ranks


def begin_anew(folder: Path, world_size: int = 2) -> list[Any]:
    """Start another training in the same place, with other processes."""
    ranks = [take(node) for node in ("node_a", "node_b")[:world_size]]
    ray.get([rank.begin.remote(str(folder), n, world_size, {}) for n, rank in enumerate(ranks)], timeout=120)
    return ranks


def save_error(ranks: list[Any], step: int, kind: type[raystow.RaystowError] = raystow.SaveFailed) -> str:
    """Save a step that cannot become a version; return the error of rank 0."""
    every(ranks, "set", layers, step, SIZE)
    every(ranks, "save", step)
    with pytest.raises(kind) as failed:
        every(ranks, "result")
    return str(failed.value)


def equal(states: list[dict[str, Any]], step: int) -> bool:
    return all(torch.equal(state[name], tensor) for state in states for name, tensor in layers(step, SIZE).items())


def state_of(rank: Any) -> dict[str, Any]:
    state: dict[str, Any] = rank.state
    return state


@pytest.mark.long
def test_a_deleted_repository_is_named_and_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    old = saved(folder)
    before = raystow.open(folder).id
    shutil.rmtree(folder)
    for step in (3, 4):  # the first deletes what it has uploaded
        error = save_error(old, step)
        assert f"of repository {before} do not exist any more" in error
        assert folder.as_uri() in error
        assert "begin anew" in error
    with pytest.raises(raystow.NotARepository, match="do not exist any more"):
        every(old, "restore")
    new = begin_anew(folder)
    every(new, "set", layers, -1, SIZE)
    assert every(new, "restore") == [None, None]
    save_state(new, 1, layers, SIZE)
    repository = raystow.open(folder)
    assert repository.id != before
    assert [version.step for version in repository.versions()] == [1]
    every(new, "set", layers, -1, SIZE)
    every(new, "restore")
    assert equal(every(new, "do", state_of), 1)
    assert before in save_error(old, 5)  # processes of the deleted repository write nothing into the new one
    with pytest.raises(raystow.NotARepository, match=f"began with repository {before}"):
        every(old, "restore")
    save_state(new, 2, layers, SIZE)
    assert [version.step for version in repository.versions()] == [1, 2]
    assert all(repository.verify(version) for version in repository.versions())


def test_a_process_can_begin_anew_at_once(tmp_path: Path) -> None:
    """The coordinator, the node workers and the process are the same, and nothing was saved after the deletion."""
    folder = tmp_path / "run"
    (rank,) = start(str(folder), 1)
    ids = set()
    for step in (1, 2, 3):
        save_state([rank], step, layers, SIZE)
        ids.add(raystow.open(folder).id)
        assert [version.step for version in raystow.open(folder).versions()] == [step]
        every([rank], "leave")
        shutil.rmtree(folder)
        ray.get(rank.begin.remote(str(folder), 0, 1, {}), timeout=120)
    assert len(ids) == 3


def lose_root(folder: Path) -> None:
    (folder / keys.ROOT).unlink()


def lose_marker(folder: Path) -> None:
    (folder / keys.MARKER).unlink()


@pytest.mark.parametrize("lose", [lose_root, lose_marker])
def test_after_a_repair_the_training_goes_on(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """No version is reported as damaged, and no other run is blamed."""
    ranks = saved(tmp_path)
    lose(tmp_path)
    if lose is lose_root:
        error = save_error(ranks, 3, raystow.OutcomeUnknown)
        assert "root is missing" in error
        assert "raystow repair" in error
    else:
        save_state(ranks, 3, layers, SIZE)
    plan_repair(open_store(str(tmp_path))).execute()
    if lose is lose_root:
        assert "later saves go on" in save_error(ranks, 4)
    save_state(ranks, 5, layers, SIZE)
    assert [version.step for version in raystow.open(tmp_path).versions()] == [1, 2, 3, 5]
    later = begin_anew(tmp_path)
    save_state(later, 6, layers, SIZE)
    every(later, "set", layers, -1, SIZE)
    assert [version.step for version in every(later, "restore")] == [6, 6]
    assert equal(every(later, "do", state_of), 6)


@pytest.mark.parametrize("same", [False, True])
def test_a_new_training_uses_the_repository_that_was_put_there(tmp_path: Path, same: bool) -> None:
    """Another one, or an older copy of the same."""
    folder, other = tmp_path / "run", tmp_path / "other"
    (rank,) = start(str(folder), 1)
    save_state([rank], 1, layers, SIZE)
    if same:
        shutil.copytree(folder, other)
    else:
        (there,) = start(str(other), 1)
        save_state([there], 1, layers, SIZE)
    kept = raystow.open(other).id
    save_state([rank], 2, layers, SIZE)
    every([rank], "leave")
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    (late,) = begin_anew(folder, 1)
    every([late], "set", layers, -1, SIZE)
    assert every([late], "restore")[0].step == 1
    assert equal(every([late], "do", state_of), 1)
    save_state([late], 3, layers, SIZE)
    assert raystow.open(folder).id == kept
    assert [version.step for version in raystow.open(folder).versions()] == [1, 3]


def test_a_restore_says_that_another_repository_is_there(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    ranks = saved(folder)
    (there,) = start(str(other), 1)
    save_state([there], 7, layers, SIZE)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    assert "has taken the place of repository" in save_error(ranks, 3)
    with pytest.raises(raystow.NotARepository, match="has taken the place of repository"):
        every(ranks, "restore")


def garble_root(folder: Path) -> None:
    (folder / keys.ROOT).write_bytes(b"{")


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("lose", [lose_root, garble_root])
def test_a_rerun_after_a_repair_saves(tmp_path: Path, lose: Callable[[Path], None], seen: bool) -> None:
    """``seen``: a save has failed before the repair."""
    ranks = saved(tmp_path)
    lose(tmp_path)
    if seen:
        assert "raystow repair" in save_error(ranks, 3, raystow.OutcomeUnknown)
    every(ranks, "leave")
    plan_repair(open_store(str(tmp_path))).execute()
    later = begin_anew(tmp_path)
    every(later, "set", layers, -1, SIZE)
    restored = every(later, "restore")
    save_state(later, 6, layers, SIZE)
    assert [version.step for version in restored] == [3, 3] if seen else [2, 2]
    assert raystow.open(tmp_path).latest().step == 6
