"""A damaged newest version in a real cluster: all ranks restore the one before, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ranks import every, start

import raystow
from raystow.orchestrator.agreement import Alone
from raystow.orchestrator.restore import restore_latest
from raystow.storage.clock import SYSTEM
from raystow.storage.format import keys

pytestmark = pytest.mark.usefixtures("cluster")


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(100_000, generator=generator) for i in range(4)}


def states(ranks: list[Any]) -> list[dict[str, Any]]:
    return ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60)


def cut_one_pack(folder: Path, version: raystow.Version) -> None:
    pack = next(folder.joinpath(keys.prefix(version.id, version.attempt)).glob("*.pack"))
    pack.write_bytes(pack.read_bytes()[:-1])


def test_all_ranks_fall_back_if_one_finds_damage(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, keep_in_memory=0)
    for seed in (1, 2):
        every(ranks, "set", state, seed)
        every(ranks, "save", seed)
        every(ranks, "result")
    repository = raystow.open(tmp_path)
    cut_one_pack(tmp_path, repository.versions()[1])
    every(ranks, "set", state, 3)
    restored = every(ranks, "restore")
    assert [version.step for version in restored] == [1, 1]
    for got in states(ranks):
        assert all(torch.equal(got[name], tensor) for name, tensor in state(1).items())
    cut_one_pack(tmp_path, repository.versions()[0])
    with pytest.raises(raystow.Damaged, match="no version is whole"):
        every(ranks, "restore")


def test_without_a_cluster_too_but_not_for_one_rank_of_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = start(str(tmp_path), 1)
    for seed in (1, 2):
        every(ranks, "set", state, seed)
        every(ranks, "save", seed)
        every(ranks, "result")
    cut_one_pack(tmp_path, raystow.open(tmp_path).versions()[1])
    into = state(3)
    version = raystow.restore_latest(tmp_path, into=into)
    assert version is not None
    assert version.step == 1
    assert all(torch.equal(into[name], tensor) for name, tensor in state(1).items())
    assert "VERSION 2 (step 2) IS DAMAGED, falling back to version 1 (step 1)" in caplog.text
    with pytest.raises(raystow.Damaged, match="Checkpointer"):
        restore_latest(raystow.open(tmp_path), into, Alone(raystow.open(tmp_path), fall_back=False))


def test_retention_is_applied_after_each_save(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, retention=raystow.Policy(keep_last=2, keep_best=("loss", "min", 1)))
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.6)):
        every(ranks, "set", state, step)
        every(ranks, "save", step, {"loss": loss})
        every(ranks, "result")
    repository = raystow.open(tmp_path)
    _until(lambda: [version.step for version in repository.versions()] == [1, 3, 4])
    assert [dropped.id for dropped in repository.root().dropped] == [1, 3]
    repository.plan_collection(grace=0).execute()
    for version in repository.versions():
        repository.verify(version)
    assert {path.parts[-2].split("-")[0] for path in tmp_path.glob("versions/*/*")} == {"00000002", "00000004", "00000005"}


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = SYSTEM.monotonic() + seconds
    while not condition():
        assert SYSTEM.monotonic() < end
        SYSTEM.sleep(0.05)
