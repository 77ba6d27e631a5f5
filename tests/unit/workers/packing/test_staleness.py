from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import rows_and_pack, whole
from helpers.local_cluster import LocalCluster
from msgspec.structs import replace

from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.packing import stale_state
from raystow.workers.protocol.messages import SaveDone
from raystow.workers.protocol.unix_channel import Connection

State = dict[str, Any]


@pytest.fixture
def save_warnings(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of the warnings sent to training processes, one list for each save."""
    warnings: list[list[str]] = []
    send = Connection.send

    def listen(self: Connection, message: object, *, fd: int | None = None) -> None:
        if isinstance(message, SaveDone):
            warnings.append(list(message.warnings))
        send(self, message, fd=fd)

    monkeypatch.setattr(Connection, "send", listen)
    return warnings


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(f"memory://t-{SYSTEM.token()}", codec="cpu") as made:
        yield made


def training_state(step: int, moment: float, *, shape: tuple[int, ...] = (30, 40)) -> State:
    """Return a state whose weights and step counters change with ``step``, and whose moments depend on ``moment`` only."""
    optimizer = {
        "exp_avg": torch.full(shape, moment),
        "exp_avg_sq": torch.full(shape, moment**2, dtype=torch.bfloat16),
        "step": torch.tensor(float(step)),
        "seen": torch.full((5,), step),
    }
    return {"model": {"w": torch.full(shape, float(step))}, "optim": {"w": optimizer}}


def test_equal_moments_at_another_step_cause_a_warning(
    cluster: LocalCluster, save_warnings: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, stale_state.logger.name):
        for step, moment in enumerate((0.5, 0.5, 0.25, 0.5), 1):
            cluster.save(training_state(step, moment), step=step)
    assert [len(warnings) for warnings in save_warnings] == [0, 1, 0, 0]
    assert "two saves hold the same optimizer state, bit for bit: those of steps 1 and 2" in save_warnings[1][0]
    said = [record.getMessage() for record in caplog.records if record.name == stale_state.logger.name]
    assert said == [f"{cluster.uri}: {save_warnings[1][0]}"]


def test_one_changed_tensor_prevents_the_warning(cluster: LocalCluster, save_warnings: list[list[str]]) -> None:
    first, second = training_state(1, 0.5), training_state(2, 0.5)
    second["optim"]["w"]["exp_avg"][7, 7] += 1
    cluster.save(first, step=1)
    cluster.save(second, step=2)
    assert save_warnings == [[], []]


def test_the_same_step_may_be_saved_twice(cluster: LocalCluster, save_warnings: list[list[str]]) -> None:
    cluster.save(training_state(1, 0.5), step=1)
    cluster.save(training_state(1, 0.5), step=1)
    assert save_warnings == [[], []]


@pytest.mark.parametrize("kept", ["model", "counters"])
def test_states_without_moments_are_not_compared(cluster: LocalCluster, save_warnings: list[list[str]], kept: str) -> None:
    same = training_state(1, 0.5)
    counters = {name: same["optim"]["w"][name] for name in ("step", "seen")}
    for step in (1, 2):
        cluster.save({"model": same["model"]} if kept == "model" else {"optim": counters}, step=step)
    assert save_warnings == [[], []]


def test_a_save_of_weights_only_is_ignored(cluster: LocalCluster, save_warnings: list[list[str]]) -> None:
    cluster.save(training_state(1, 0.5), step=1)
    cluster.save({"model": training_state(2, 0.5)["model"]}, step=2)
    cluster.save(training_state(3, 0.5), step=3)
    assert [len(warnings) for warnings in save_warnings] == [0, 0, 1]


def test_all_ranks_of_a_node_get_the_warning(cluster: LocalCluster, save_warnings: list[list[str]]) -> None:
    for step in (1, 2):
        cluster.save_all([training_state(step, 0.5), training_state(step, 0.5)], step=step)
    assert [len(warnings) for warnings in save_warnings] == [0, 0, 1, 1]


def test_repositories_are_watched_separately() -> None:
    rows = rows_and_pack({name: whole(np.arange(9, dtype=np.float32)) for name in "ab"})[0]
    rows = [replace(row, group="optimizer") for row in rows]
    one, other = stale_state.OptimizerWatch("memory://1"), stale_state.OptimizerWatch("memory://2")
    assert one.saved(1, rows) == other.saved(2, rows) == ()
    assert len(one.saved(2, rows[::-1])) == 1
