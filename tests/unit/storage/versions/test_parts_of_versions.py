"""A version with parts: its ranks and each part read what is their own, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
from raystow.orchestrator.restore.what_if import plan_world
from raystow.storage.errors import Damaged, StateError
from raystow.storage.format.parts import part_key, part_number, part_of
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.retention.policy import Policy

RANK = {"w": torch.arange(5000.0), "optim": {"m": torch.ones(5)}, "step": 4}
BUFFER = {"w": np.arange(9000), "optim": {"m": torch.zeros(3)}, "step": 7, "mine": raystow.PerRank({"seed": 3})}
ROLLOUTS = {"ids": np.arange(4)}


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[LocalCluster, raystow.Version]]:
    with LocalCluster("memory://parts", nodes=3) as cluster:
        version = cluster.save_with_parts(RANK, {"buffer": BUFFER, "rollouts": ROLLOUTS}, step=4)
        yield cluster, raystow.open("memory://parts").version(version.id)


Saved = tuple[LocalCluster, raystow.Version]


def restore_part(version: raystow.Version, into: dict[str, object], part: str = "buffer") -> None:
    plan_restore(version, {part_key(part): into}, RestoreOptions(part=part)).execute()


def test_a_version_lists_its_parts(saved: Saved) -> None:
    _, version = saved
    assert version.parts() == {"buffer": 72_012, "rollouts": 32}
    assert version.world_size == 1
    assert {info.group for name, info in version.tensors().items() if part_of(name)} == {"parts"}
    assert version.per_rank("[part buffer].mine") == {0: {"seed": 3}}
    members = {rank for info in version.record.fragments for rank in info.ranks}
    assert members == {0, part_number("buffer"), part_number("rollouts")}


def test_ranks_restore_a_version_with_parts_strictly(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    _, version = saved
    into = {"w": torch.zeros(5000), "optim": {"m": torch.zeros(5)}, "step": 0}
    assert raystow.restore(version, into) == version
    assert torch.equal(into["w"], RANK["w"])
    assert into["step"] == 4
    assert not caplog.records


def test_more_ranks_restore_nothing_of_a_part(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    _, version = saved
    for rank in range(3):
        into = {"w": torch.zeros(5000), "optim": {"m": torch.zeros(5)}, "step": 0}
        plan_restore(version, into, RestoreOptions(rank, 3)).execute()
        assert into["step"] == 4
    assert "[part" not in caplog.text


def test_a_part_restores_its_own_state(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    _, version = saved
    into = {"w": np.zeros(9000, int), "optim": {"m": torch.ones(3)}, "step": 0, "mine": {"seed": 0}}
    restore_part(version, into)
    assert np.array_equal(into["w"], BUFFER["w"])
    assert torch.equal(into["optim"]["m"], torch.zeros(3))
    assert (into["step"], into["mine"]) == (7, {"seed": 3})
    assert not caplog.records


def test_a_part_reads_the_fragment_of_its_node_only(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    _, version = saved
    finder = version.finder(RestoreOptions(part="rollouts").seeker(version))
    assert finder.read_all().names == {"[part rollouts].ids"}
    assert finder.complete


def test_names_that_only_a_part_has_are_refused(saved: Saved) -> None:
    _, version = saved
    with pytest.raises(StateError, match=r"\[part buffer\]\.optim\.m"):
        restore_part(version, {"w": np.zeros(9000, int), "step": 0, "mine": {"seed": 0}})
    with pytest.raises(StateError, match=r"\[part other\]\.w"):
        restore_part(version, {"w": np.zeros(9000, int)}, "other")


def test_a_plan_for_more_ranks_leaves_parts_out(saved: Saved) -> None:
    _, version = saved
    assert plan_world(version, 4, per_node=2).store.chunks == 2, "those of w and m"


def test_a_thinned_version_has_no_parts() -> None:
    with LocalCluster("memory://thinned-parts") as cluster:
        for step in (1, 2):
            cluster.save_with_parts(RANK, {"buffer": BUFFER}, step=step)
        repository = raystow.open("memory://thinned-parts")
        repository.plan_retention(Policy(resumable=1)).execute()
        old, new = repository.versions()
        assert (old.parts(), new.parts()) == ({}, {"buffer": 72_012})
        assert not any(map(part_of, [*old.tensors(), *old.values()]))
        repository.verify(old, deep=True)
        into = {"w": torch.zeros(5000), "step": 0}
        raystow.restore(old, into)
        assert torch.equal(into["w"], RANK["w"])


def test_unchanged_data_of_a_part_is_stored_once() -> None:
    with LocalCluster("memory://same-parts", delta="auto") as cluster:
        first, second = (cluster.save_with_parts(RANK, {"buffer": BUFFER}, step=step) for step in (1, 2))
        assert second.bytes < first.bytes / 4
        into = {"w": np.zeros(9000, int), "optim": {"m": torch.ones(3)}, "step": 0, "mine": {"seed": 0}}
        restore_part(second, into)
        assert np.array_equal(into["w"], BUFFER["w"])


@pytest.mark.parametrize("parts", [{"a b": 1}, {"": 1}, {"x": -1}, {"x": "1"}, {f"p{i}": 0 for i in range(1025)}, ["x"]])
def test_invalid_parts_of_a_record_are_refused(saved: Saved, parts: object) -> None:
    record = saved[1].record
    object.__setattr__(changed := VersionRecord(**vars(record)), "parts", parts)
    with pytest.raises(Damaged, match=r"parts|field"):
        VersionRecord.load(changed.dump(), record.key())
