"""Descriptors, threads, memory and shared memory of a rank, its node worker and the coordinator over thousands of saves."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import ray
import torch
from helpers import growth

import raystow
from integration.ranks import Rank, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def save_often(self: Rank, first: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(100_000, generator=generator)
    for step in range(first, first + count):
        w[step % 1000 :: 1000] += step
        self.checkpointer.save({"w": w, "step": step}, step=step).result(60)


def test_three_processes_do_not_grow(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1, retention=raystow.Policy(keep_last=3), memory=32 << 20)
    (worker,) = ray.get(rank.node_worker_pids.remote())
    pids = {
        "rank": ray.get(rank.pid.remote()),
        "node worker": worker,
        "coordinator": ray.get(coordinator_actor(tmp_path.as_uri()).__ray_call__.remote(lambda _: os.getpid())),
    }
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    course: growth.Course = {}
    each = max(1, growth.SAVES // growth.SAMPLES)
    for first in range(1, growth.SAVES + 1, each):
        ray.get(rank.do.remote(save_often, first, each), timeout=600)
        growth.sample(course, processes)
    growth.write("growth_on_ray", course, growth.SAVES, tmp_path)
    growth.check_flat(course)
    assert len(raystow.open(tmp_path).versions()) <= 13  # three, their bases, and the versions since the last retention run
