"""Parts that several nodes restore are read from the store once and sent to the other nodes, also if a node worker dies.

``make test`` restores a replicated state; ``make soak`` also restores sharded tensors on another world size.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.ranks import Rank, every, start

NODES = ("node_a", "node_b", "node_c")


@pytest.fixture(scope="module", autouse=True)
def third_node(cluster: Cluster) -> Iterator[None]:
    node = cluster.add_node(num_cpus=2, resources={"node_c": 100}, include_log_monitor=False)
    yield
    cluster.remove_node(node)


def whole(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn((3072, 1024), generator=generator) for i in range(4)}


def split(self: Rank, where: str, seed: int) -> None:
    """Set the state to DTensors sharded over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, world = self.checkpointer.rank, self.checkpointer.world_size
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    self.state = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in whole(seed).items()}


def restore(self: Rank, kills: bool = False) -> tuple[int, dict[str, int]]:
    """Restore, and return the step and the bytes read for this rank by source. ``kills``: kill the node worker during the
    restore."""
    read = Counter[str]()

    class ReadHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            read.update(getattr(record, "bytes_read", {}))

    doomed = self.node_worker_pids() if kills else []
    assert len(doomed) == kills

    def begun(nbytes: int) -> None:
        while doomed:
            os.kill(doomed.pop(), signal.SIGKILL)

    logger, handler = logging.getLogger("raystow.orchestrator.restore.agreement"), ReadHandler()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    version = self.checkpointer.restore_latest(into=self.state, progress=begun)
    logger.removeHandler(handler)
    assert version is not None
    assert not doomed
    return version.step, dict(read)


def is_whole(self: Rank, seed: int) -> bool:
    """Assert that every tensor equals the saved one or this rank's part of it, and return True."""
    expected = whole(seed)
    for name, got in self.state.items():
        rows = (
            expected[name].chunk(self.checkpointer.world_size)[self.checkpointer.rank]
            if hasattr(got, "to_local")
            else expected[name]
        )
        assert torch.equal(got.to_local() if hasattr(got, "to_local") else got, rows)
    return True


def save_step(folder: Path, ranks: list[Any], step: int) -> raystow.Version:
    every(ranks, "save", step)
    version: raystow.Version = every(ranks, "result")[0]
    return version


def stored(version: raystow.Version) -> int:
    """Return the bytes of the packs and of the manifest."""
    return version.bytes + sum(info.size for info in version.record.fragments)


@pytest.mark.parametrize("workers_die", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.long
def test_a_replicated_state_is_read_once_for_three_nodes(tmp_path: Path, workers_die: bool) -> None:
    ranks = start(str(tmp_path), 3, nodes=NODES, memory=raystow.Memory(cache=0), replication=raystow.Replication(0))
    every(ranks, "set", whole, 1)
    version = save_step(tmp_path, ranks, 1)
    every(ranks, "set", whole, 2)
    results = ray.get([rank.do.remote(restore, workers_die and i == 2) for i, rank in enumerate(ranks)], timeout=120)
    assert [step for step, _ in results] == [1, 1, 1]
    assert every(ranks, "do", is_whole, 1) == [True] * 3
    read = sum((Counter(of) for _, of in results), Counter[str]())
    if not workers_die:
        assert read["store"] <= 1.05 * stored(version)
        assert read["instead"] == 0
        assert read["peer"] == pytest.approx(2 * version.bytes, rel=0.05)


@pytest.mark.slow
def test_a_state_of_four_ranks_is_read_once_for_three_nodes(tmp_path: Path) -> None:
    uri = str(tmp_path / "runs")
    ranks = start(uri, 4, nodes=NODES, memory=raystow.Memory(cache=0), replication=raystow.Replication(0))
    every(ranks, "do", split, str(tmp_path / "four"), 1)
    version = save_step(tmp_path, ranks, 5)
    for rank in ranks:
        ray.kill(rank)
    ranks = start(uri, 3, nodes=NODES, memory=raystow.Memory(cache=0), replication=raystow.Replication(0))
    every(ranks, "do", split, str(tmp_path / "three"), 2)
    results = every(ranks, "do", restore)
    assert every(ranks, "do", is_whole, 1) == [True] * 3
    read = sum((Counter(of) for _, of in results), Counter[str]())
    assert read["store"] + read["instead"] <= 1.05 * stored(version)
    assert read["peer"] > 0.2 * version.bytes  # the chunks that two nodes need
