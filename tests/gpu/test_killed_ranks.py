"""A training process with tensors on a GPU that is killed once its save is staged loses no save, in both modes of coding."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.gpu_tensors import same_bits, weights
from helpers.local_cluster import LocalCluster, first_save
from helpers.polling import wait_until
from msgspec.structs import replace

import raystow
from raystow.orchestrator.coordinator.attempt import Phase
from raystow.state.planner import plan_save
from raystow.workers.protocol.messages import OpenSession
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20


def state(step: int) -> dict[str, Any]:
    """Return the same tensors in each process: 384 MiB on the GPU, more than the rings, and some in host memory."""
    torch.manual_seed(step)
    return {**{f"layer{i}": weights(24 * MIB, torch.float32) for i in range(4)}, "host": torch.arange(MIB) + step, "step": step}


def train(address: str, opening: OpenSession, step: int, end: str) -> None:
    """Save as a training process, and die once the save is staged."""
    staging = Staging(address, opening)
    plan = plan_save(state(step), rank=0, world_size=1)

    class Dying(SaveProgress):
        def note_staged(self) -> None:
            if end == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)

    staging.submit(SaveOrder(first_save(opening, step=step), plan, Dying(step), lambda outcome: None))
    signal.pause()


@pytest.mark.parametrize("end", ["SIGKILL", "os._exit"])
@pytest.mark.parametrize("process", ["training", "node"])
def test_a_staged_save_survives_its_process(folder: Path, process: Literal["training", "node"], end: str) -> None:
    with LocalCluster(str(folder), memory=256 * MIB, process=process) as cluster:
        for step in range(3):
            opening = replace(cluster.opening(0, 1), process=process)
            training = multiprocessing.get_context("spawn").Process(target=train, args=(cluster.address(0), opening, step, end))
            training.start()
            training.join(180)
            assert training.exitcode == (-signal.SIGKILL if end == "SIGKILL" else 0)
            wait_until(lambda: all(one.phase.over for one in cluster.coordinator.attempts), "the save ends")
            assert [one.reason for one in cluster.coordinator.attempts if one.phase is Phase.ABORTED] == []
            expected = state(step)
            into = {name: torch.zeros_like(one) if torch.is_tensor(one) else None for name, one in expected.items()}
            version = raystow.restore_latest(cluster.uri, into=into)
            assert version is not None
            assert (version.step, into["step"]) == (step, step)
            assert all(same_bits(into[name], one) for name, one in expected.items() if torch.is_tensor(one))
