"""A damaged newest version in a cluster: all ranks restore the previous version and report this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers
from helpers.polling import wait_until

import raystow
from integration.ranks import every, start
from raystow.orchestrator.restore.agreed import restore_agreed
from raystow.orchestrator.restore.agreement import LocalAgreement
from raystow.storage.format import keys

SIZE = 100_000
"""Elements in each layer."""

pytestmark = pytest.mark.usefixtures("cluster")


def rank_states(ranks: list[Any]) -> list[dict[str, Any]]:
    return ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60)


def cut_one_pack(folder: Path, version: raystow.Version, which: str = "*.pack") -> None:
    pack = next(folder.joinpath(keys.prefix(version.id, version.attempt)).glob(which))
    pack.write_bytes(pack.read_bytes()[:-1])


def test_all_ranks_fall_back_if_one_finds_damage(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, memory=raystow.Memory(cache=0))
    for seed in (1, 2):
        every(ranks, "set", layers, seed, SIZE)
        every(ranks, "save", seed)
        every(ranks, "result")
    repository = raystow.open(tmp_path)
    cut_one_pack(tmp_path, repository.versions()[1])
    every(ranks, "set", layers, 3, SIZE)
    restored = every(ranks, "restore")
    assert [version.step for version in restored] == [1, 1]
    for got in rank_states(ranks):
        assert all(torch.equal(got[name], tensor) for name, tensor in layers(1, SIZE).items())
    cut_one_pack(tmp_path, repository.versions()[0])
    with pytest.raises(raystow.Damaged, match="no version is whole"):
        every(ranks, "restore")


def test_a_restore_without_a_cluster_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = start(str(tmp_path), 1)
    for seed in (1, 2):
        every(ranks, "set", layers, seed, SIZE)
        every(ranks, "save", seed)
        every(ranks, "result")
    cut_one_pack(tmp_path, raystow.open(tmp_path).versions()[1])
    into = layers(3, SIZE)
    version = raystow.restore_latest(tmp_path, into=into)
    assert version is not None
    assert version.step == 1
    assert all(torch.equal(into[name], tensor) for name, tensor in layers(1, SIZE).items())
    assert "VERSION 2 (step 2) IS DAMAGED, falling back to version 1 (step 1)" in caplog.text
    with pytest.raises(raystow.Damaged, match="Checkpointer"):
        restore_agreed(raystow.open(tmp_path), into, LocalAgreement(raystow.open(tmp_path), fall_back=False))


@pytest.mark.parametrize("alone", [False, True])
def test_thinned_versions_are_skipped_and_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    def mixed(seed: int) -> dict[str, Any]:
        return {"model": layers(seed, SIZE), "optimizer": layers(seed + 10, SIZE)}

    ranks = start(str(tmp_path), 1, memory=raystow.Memory(cache=0))
    for seed in range(1, 5):
        every(ranks, "set", mixed, seed)
        every(ranks, "save", seed)
        every(ranks, "result")
    repository = raystow.open(tmp_path)
    repository.pin(repository.version(1), "stays")
    repository.plan_retention(raystow.Policy(resumable=1)).execute()
    assert [version.resumable for version in repository.versions()] == [True, False, False, True]
    cut_one_pack(tmp_path, repository.version(4), "weights-*.pack")
    into = mixed(9)
    if alone:
        found = raystow.restore_latest(tmp_path, into=into)
        assert "VERSION 4 (step 4) IS DAMAGED, falling back to version 3 (step 3)" in caplog.text
        assert "version 3 (step 3) holds too little, falling back to version 2 (step 2): " in caplog.text
        assert caplog.text.count("IS DAMAGED") == 1
    else:
        every(ranks, "set", mixed, 9)
        (found,) = every(ranks, "restore")
        (into,) = rank_states(ranks)
    assert found is not None
    assert found.id == 1
    for got, expected in zip(into.values(), mixed(1).values(), strict=True):
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    repository.unpin("stays")
    repository.plan_retention(raystow.Policy(resumable=1)).execute()
    with pytest.raises(raystow.Damaged, match="no version is whole and holds all that is asked for") as caught:
        raystow.restore_latest(tmp_path, into=into) if alone else every(ranks, "restore")
    assert "holds its weights only" in str(caught.value)
    weights = {"model": layers(9, SIZE)}
    found = raystow.restore_latest(tmp_path, into=weights, strict=False)
    assert found is not None
    assert found.id == 3
    assert all(torch.equal(weights["model"][name], tensor) for name, tensor in layers(3, SIZE).items())


def test_retention_is_applied_after_each_save(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, retention=raystow.Policy(keep_last=2, keep_best=("loss", "min", 1)))
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.6)):
        every(ranks, "set", layers, step, SIZE)
        every(ranks, "save", step, {"loss": loss})
        every(ranks, "result")
    repository = raystow.open(tmp_path)
    wait_until(lambda: [version.step for version in repository.versions()] == [1, 3, 4], "retention has dropped versions")
    assert [dropped.id for dropped in repository.root().dropped] == [1, 3]
    repository.plan_collection(grace=0).execute()
    for version in repository.versions():
        repository.verify(version)
    assert {path.parts[-2].split("-")[0] for path in tmp_path.glob("versions/*/*")} == {"00000002", "00000004", "00000005"}
