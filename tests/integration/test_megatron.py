"""``raystow.megatron`` with real GPTs: every layout restores the saves of every other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

import raystow

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")

from integration.megatron_ranks import Layout, Training, run, whole


def save(training: Training, uri: str, steps: int = 2) -> tuple[Any, list[str]]:
    """Train, save, and train on while the save is in flight."""
    import raystow.megatron

    with raystow.Checkpointer(uri) as checkpointer:
        losses = training.train(steps)
        found = training.parts()
        raystow.megatron.save(checkpointer, training.state(), step=training.step_number)
        losses += training.train(2, before=checkpointer.fence)
    return found, losses


def load(training: Training, uri: str, steps: int = 0) -> tuple[Any, list[str]]:
    import raystow.megatron

    with raystow.Checkpointer(uri) as checkpointer:
        loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True))
        assert loaded is not None
        training.take(loaded)
        return training.parts(), training.train(steps)


@pytest.mark.parametrize("sharded", [True, False])
def test_megatron_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path, sharded: bool) -> None:
    layout, uri = Layout(dp=2, sharded=sharded), str(tmp_path / "run")
    saved = run(tmp_path / "a", cluster.address, layout, save, uri)
    resumed = run(tmp_path / "b", cluster.address, layout, load, uri, 2, seed=2)
    assert whole([found for found, _ in resumed]) == whole([found for found, _ in saved])
    assert [losses for _, losses in resumed] == [losses[4:] for _, losses in saved]
