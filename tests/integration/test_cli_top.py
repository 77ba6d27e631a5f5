"""``raystow top`` on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

import raystow
from integration import schemas
from integration.cli_runner import run, run_json
from integration.ranks import every, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store

pytestmark = pytest.mark.usefixtures("cluster")


def constant_layers(seed: int) -> dict[str, object]:
    import torch

    return {f"layer{i}": torch.full((300_000,), float(seed)) for i in range(4)}


@pytest.mark.long
def test_top_reports_saves_and_survives_a_coordinator_restart(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, memory=raystow.Memory(cache=64 << 20))
    every(ranks, "set", constant_layers, 1)
    every(ranks, "save", 1)
    every(ranks, "result")
    ray.get(ranks[0].save.remote(2), timeout=60)  # rank 1 does not save step 2
    ray.get(ranks[0].fence.remote(), timeout=60)
    end = SYSTEM.monotonic() + 60
    while not (facts := run_json("top", tmp_path))["saves"] or not any(n["answers"] and n["saves"] for n in facts["nodes"]):
        assert SYSTEM.monotonic() < end, facts
    (save,) = facts["saves"]
    assert (facts["uri"], facts["newest"]["id"], facts["newest"]["step"]) == (tmp_path.as_uri(), 1, 1)
    assert (save["step"], save["phase"], save["begun"], save["world_size"]) == (2, "waiting for ranks", 1, 2)
    nodes = [node for node in facts["nodes"] if node["answers"]]
    assert sum(node["ranks"] for node in nodes) == 2
    assert sum(node["memory"] for node in nodes) > 0
    (node_save,) = [node_save for node in nodes for node_save in node["saves"]]
    assert sorted(rank for at in node_save["ranks"].values() for rank in at) == [0]
    shown = run("top", tmp_path, "--once").stdout.splitlines()
    assert max(map(len, shown)) <= 80 or tmp_path.as_uri() in max(shown, key=len)
    assert any("waiting for" not in line and "ranks" in line and "1/2" in line for line in shown)

    ray.kill(coordinator_actor(open_store(str(tmp_path)).uri), no_restart=False)
    end = SYSTEM.monotonic() + 60
    while answering(facts := run_top_in_a_process(tmp_path)) != [True, True]:
        assert SYSTEM.monotonic() < end, facts


def run_top_in_a_process(folder: Path) -> dict[str, Any]:
    """Run ``top --json`` in a separate process, because Ray will print the coordinator's death on the stdout of this one."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "raystow", "top", str(folder), "--address", address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    schemas.check("top", facts)
    return facts


def answering(facts: dict[str, Any]) -> list[bool]:
    """Return for each node with ranks whether it answers."""
    return [node["answers"] for node in facts["nodes"] if node.get("ranks")]
