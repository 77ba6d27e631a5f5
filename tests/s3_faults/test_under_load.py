"""Many faults stall, break or corrupt bodies while several ranks on two nodes save and restore at the same time."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  # seeded
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy

import raystow
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.s3

RANKS = 4
STORING = [Fault.SLOW_DOWN, Fault.RESET_REQUEST, Fault.STALL_REQUEST, Fault.CORRUPT_REQUEST, Fault.LOSE_ANSWER]
READING = [Fault.SLOW_DOWN, Fault.RESET_ANSWER, Fault.STALL_ANSWER, Fault.CORRUPT_ANSWER]
PACKS = r"\.pack"


def states(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    return [{"w": torch.randn(300_000, generator=generator), "step": step}] * RANKS


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_saves_and_restores_survive_many_faults(proxy: FaultProxy, s3_bucket: str, seed: int) -> None:
    """Every save becomes a correct version or fails, and no restore returns a wrong bit."""
    rng, steps, saved = random.Random(seed), range(1, 4), []
    with LocalCluster(f"s3://{s3_bucket}/t-{SYSTEM.token()}/run", nodes=2) as cluster:
        for step in steps:
            for fault in rng.choices(STORING, k=3):
                proxy.inject(fault, "PUT|POST", PACKS, skip=rng.randrange(3))
            with contextlib.suppress(raystow.SaveFailed):
                saved.append((cluster.save_all(states(step), step=step).id, step))
            proxy.heal()
        versions = raystow.open(cluster.uri).versions()
        assert [(version.id, version.step) for version in versions] == saved
        for fault in rng.choices(READING, k=3):
            proxy.inject(fault, "GET", PACKS, skip=rng.randrange(3))

        def restored(version: raystow.Version) -> bool:
            into = {"w": torch.zeros(300_000), "step": 0}
            try:
                raystow.restore(version, into)
            except (raystow.StoreError, raystow.Damaged):  # damaged: two reads were corrupted
                return True
            return torch.equal(into["w"], states(version.step)[0]["w"])

        with ThreadPoolExecutor(RANKS) as ranks:
            assert all(ranks.map(restored, versions * RANKS))
        proxy.heal()
        for version in versions:
            raystow.open(cluster.uri).verify(version)
