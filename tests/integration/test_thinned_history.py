"""The history of a training is thinned to deltas by ``raystow prune``, collected, and restored version by version."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.builders import orphans
from helpers.local_cluster import LocalCluster
from torch import nn

import raystow
from integration.cli_runner import ran, run_json
from raystow.cli.pricing import savings
from raystow.storage.repository import open_repository

SAVES, RESUMABLE, DELTA = 9, 2, 3


class Training:
    """Mixed-precision training of a small byte-level language model on torch's source code; AdamW has a master copy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Embedding(256, 192), nn.Linear(192, 384), nn.ReLU(), nn.Linear(384, 256)).bfloat16()
        self._master = {name: weight.detach().float().requires_grad_() for name, weight in self._model.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._master.values(), lr=3e-4)
        self._text = torch.tensor(list(inspect.getsource(torch).encode()))

    def step(self, number: int) -> None:
        starts = torch.randint(len(self._text) - 1, (128,), generator=torch.Generator().manual_seed(number))
        F.cross_entropy(self._model(self._text[starts]).float(), self._text[starts + 1]).backward()
        for (_, weight), master in zip(self._model.named_parameters(), self._master.values(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(self._model.parameters()), list(self._master.values()))

    def state(self) -> dict[str, Any]:
        moments = {f"{i}": {"exp_avg": of["exp_avg"], "exp_avg_sq": of["exp_avg_sq"]} for i, of in enumerate(self._of)}
        return {"model": dict(self._model.state_dict()), "optimizer": {"master": dict(self._master), "state": moments}}

    @property
    def _of(self) -> list[dict[str, torch.Tensor]]:
        return list(self._optimizer.state.values())


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.slow
def test_a_history_thinned_to_deltas_has_all_weight_bits(tmp_path: Path) -> None:
    folder, training, saved = tmp_path / "run", Training(), list[dict[str, bytes]]()
    with LocalCluster(str(folder)) as local:
        for number in range(10 * SAVES):
            training.step(number)
            if number % 10 == 9:
                local.save_all([training.state()], step=number + 1)
                saved.append(bits(training.state()["model"]))
    repository = open_repository(str(folder))
    full = sum(version.bytes for version in repository.versions())
    done = run_json("prune", folder, "--resumable", RESUMABLE, "--delta", DELTA)
    assert done["thinned"] == list(range(1, SAVES - RESUMABLE + 1))
    assert done["versions"][1]["rules"][-1] == "older than the last 2 resumable, as a delta to version 1"
    ran("gc", folder, "--grace", "0s", "--yes")
    assert orphans(repository) == []
    versions = repository.versions()
    assert [v.entry.bases for v in versions] == [(), (1,), (2,), (3,), (), (5,), (6,), (), ()]
    for version, expected in zip(versions, saved, strict=True):
        into = {name: torch.zeros_like(tensor) for name, tensor in training.state()["model"].items()}
        raystow.restore(version, {"model": into}, strict=not version.resumable)
        assert bits(into) == expected
    assert sum(version.bytes for version in versions) < full / 3
    sizes = [version.bytes for version in versions]
    assert max(sizes[1:4] + sizes[5:7]) < 0.75 * min(sizes[0], sizes[4])
    ran("verify", folder, "--all", "--deep")
    assert "and 2 versions that it needs" in " ".join(ran("show", folder, 4).stdout.split())
    found = {one.technique: one for one in savings(repository.root().versions, 0)}
    assert found["delta"].explanation.startswith("5 deltas between versions")
    assert found["delta"].stored < 0.75 * found["delta"].instead


def test_delta_without_resumable_is_a_usage_error(tmp_path: Path) -> None:
    text = " ".join(ran("prune", tmp_path, "--keep-last", 3, "--delta", 3, code=2).stderr.split())
    assert "resumable" in text
