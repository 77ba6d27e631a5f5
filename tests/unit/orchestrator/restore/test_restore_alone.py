"""``raystow.restore`` and ``Version.restore``: they restore any version, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.format import keys

State = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a repository with versions 1 to 4, whose elements equal their ids. Versions 2 and 3 are of step 20, and version 2
    is pinned.
    """
    with LocalCluster(str(tmp_path)) as local:
        for id, step in enumerate((10, 20, 20, 30), start=1):
            version = local.save({"model": torch.full((50,), float(id)), "optim": {"m": torch.full((50,), float(id))}}, step=step)
            if id == 2:
                local.repository.pin(version, "best")
    return tmp_path


def blank() -> State:
    return {"model": torch.zeros(50), "optim": {"m": torch.zeros(50)}}


def is_full_of(state: State, id: int) -> bool:
    return bool((state["model"] == id).all() and (state["optim"]["m"] == id).all())


def cut_one_pack(folder: Path, version: raystow.Version) -> None:
    pack = next(folder.joinpath(keys.prefix(version.id, version.attempt)).glob("*.pack"))
    pack.write_bytes(pack.read_bytes()[:-1])


@pytest.mark.parametrize(("which", "id"), [(1, 1), ("3", 3), ("best", 2), ("step:20", 3), ("step:10", 1), ("latest", 4)])
def test_any_version_is_restored(folder: Path, which: int | str, id: int) -> None:
    state = blank()
    restored = raystow.restore(folder, state, which)
    assert restored == raystow.open(folder).version(id)
    assert is_full_of(state, id)


def test_a_version_restores_itself(folder: Path) -> None:
    version, read = raystow.open(folder).version("best"), list[int]()
    state = blank()
    assert raystow.restore(version, state, progress=read.append) == version
    assert is_full_of(state, 2)
    assert sum(read) == 2 * 50 * 4
    state = blank()
    assert raystow.restore(folder, into=state, version=version) == version
    assert is_full_of(state, 2)
    weights = {"model": torch.zeros(50, dtype=torch.float64)}
    raystow.restore(version, weights, strict=False, cast=True)
    assert (weights["model"] == 2).all()


def test_without_a_version_the_latest_is_restored(folder: Path) -> None:
    for restore in (raystow.restore, raystow.restore_latest):
        state = blank()
        version = restore(folder, into=state)
        assert version is not None
        assert version.id == 4
        assert is_full_of(state, 4)


def test_a_version_is_leased_during_its_restore(folder: Path) -> None:
    repository, leased = raystow.open(folder), list[set[tuple[int, str]]]()
    version = repository.version(2)
    raystow.restore(version, blank(), progress=lambda nbytes: leased.append(repository.leased()))
    assert {(version.id, version.attempt)} in leased
    assert repository.leased() == set()


def test_a_damaged_version_is_an_error_and_not_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    version = raystow.open(folder).version(2)
    cut_one_pack(folder, version)
    for restore in (lambda: raystow.restore(version, blank()), lambda: raystow.restore(folder, blank(), "best")):
        with pytest.raises(raystow.Damaged, match=r"^version 2 \(step 20\): .*choose another version") as caught:
            restore()
        assert ".pack" in caught.value.what
    assert "falling back" not in caplog.text
    cut_one_pack(folder, raystow.open(folder).version(4))
    state = blank()
    assert raystow.restore(folder, state).id == 3  # the latest intact version
    assert is_full_of(state, 3)


def test_a_dropped_version_is_an_error(folder: Path) -> None:
    repository = raystow.open(folder)
    version = repository.version(1)
    repository.plan_retention(raystow.Policy(keep_last=1)).execute()
    state = blank()
    for restore in (lambda: raystow.restore(version, state), lambda: raystow.restore(folder, state, 1)):
        with pytest.raises(raystow.NotFound, match="version 1 was dropped"):
            restore()
    with pytest.raises(raystow.NotFound, match="there is no version of step 10"):
        raystow.restore(folder, state, "step:10")
    assert is_full_of(state, 0)


def test_a_thinned_version_restores_its_weights(folder: Path) -> None:
    repository = raystow.open(folder)
    before = repository.version(3)
    repository.plan_retention(raystow.Policy(resumable=1)).execute()
    for version in (before, repository.version(3)):
        with pytest.raises(raystow.StateError, match=r"version 3: .*was thinned at .*allow_missing='optim"):
            raystow.restore(version, blank())
        weights = {"model": torch.zeros(50)}
        raystow.restore(version, weights)
        assert (weights["model"] == 3).all()


def test_a_restore_from_an_empty_repository(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with LocalCluster(str(empty)):
        pass
    assert raystow.restore(empty, blank()) is None
    with pytest.raises(raystow.NotFound, match="the first save creates a version"):
        raystow.restore(empty, blank(), "best")


def test_copies_are_restored_into_interleaved_memory(tmp_path: Path) -> None:
    """Equal tensors are stored once. One target is between the rows of the other one."""
    weights = torch.arange(8192.0).reshape(2, 4096)
    with LocalCluster(str(tmp_path)) as cluster:
        version = cluster.save({"a": weights, "b": weights.clone()}, step=1)
    assert [row.derivation is not None for rows in version.chunks.values() for row in rows] == [False, True]
    memory = torch.zeros(2, 3 * 4096)
    into = {"a": memory[0, 4096:].view(2, 4096), "b": memory[:, :4096]}
    raystow.restore(version, into)
    assert torch.equal(into["a"], weights)
    assert torch.equal(into["b"], weights)
