"""``raystow.megatron`` with real GPTs: every layout restores the saves of every other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


def load_each(training: Training, uris: list[str]) -> list[Any]:
    """Load from each repository, and return the parts. The random generators of a layout are its own."""
    import raystow.megatron

    found = []
    for uri in uris:
        with raystow.Checkpointer(uri) as checkpointer:
            loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True, rng=False))
            training.take(loaded)
        found.append(training.parts())
    return found


def check_every_layout(cluster: Cluster, tmp_path: Path, saved: list[Layout], restored: list[Layout]) -> None:
    """Assert that each layout restores what each of the others has saved, bit for bit."""
    uris, expected = [], []
    for number, layout in enumerate(saved):
        uris.append(str(tmp_path / f"run-{number}"))
        expected.append(whole([found for found, _ in run(tmp_path / f"s{number}", cluster.address, layout, save, uris[-1])]))
    assert len({repr(one) for one in expected}) == len(expected)
    for number, layout in enumerate(restored):
        found = run(tmp_path / f"r{number}", cluster.address, layout, load_each, uris, seed=10 + number)
        for of_run, whole_run in enumerate(expected):
            assert whole([of_rank[of_run] for of_rank in found]) == whole_run


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        pytest.param(Layout(tp=2), Layout(dp=2), id="tensors-to-data"),
        pytest.param(Layout(pp=2), Layout(tp=2), id="pipeline-to-tensors"),
        pytest.param(Layout(pp=2, chunks=2), Layout(pp=2), id="virtual-stages"),
        pytest.param(Layout(dp=2, sharded=False), Layout(tp=2, sharded=False), id="mixed-precision"),
        pytest.param(Layout(dp=2, frozen=True), Layout(tp=2, frozen=True), id="frozen"),
        pytest.param(Layout(dp=2, dtype=torch.float32), Layout(tp=2, dtype=torch.float32), id="fp32"),
        pytest.param(Layout(dp=2, ep=2, experts=4), Layout(experts=4), id="experts"),
        pytest.param(Layout(experts=4), Layout(dp=2, ep=2, experts=4), id="to-experts"),
    ],
)
def test_another_layout_restores_every_bit(cluster: Cluster, tmp_path: Path, saved: Layout, restored: Layout) -> None:
    check_every_layout(cluster, tmp_path, [saved], [restored])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_every_layout_restores_every_other(cluster: Cluster, tmp_path: Path, sharded: bool) -> None:
    sizes = (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (1, 1, 4)
    layouts = [Layout(tp, pp, dp, sharded=sharded) for tp, pp, dp in sizes]
    check_every_layout(cluster, tmp_path, layouts, layouts)
