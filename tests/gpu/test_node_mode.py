"""``process="node"``: the node worker encodes tensors that training processes copy into shared device memory."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gpu_tensors import layouts, same_bits, weights
from helpers.local_cluster import LocalCluster, first_save
from helpers.polling import wait_until
from msgspec.structs import replace

import raystow
from raystow.state.planner import plan_save
from raystow.storage.errors import ClusterError
from raystow.workers.protocol.messages import OpenSession
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128]


@pytest.fixture
def cluster(folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster(str(folder), memory=256 * MIB, process="node") as cluster:
        yield cluster


def check(cluster: LocalCluster, state: dict[str, torch.Tensor]) -> None:
    """Check that ``restore_latest`` and ``Version.read`` return ``state`` bit for bit."""
    into = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in state.items()}
    version = raystow.restore_latest(cluster.uri, into=into)
    assert version is not None
    for name, tensor in state.items():
        assert same_bits(into[name], tensor), name
        assert same_bits(version.read(name), tensor), name


def free_memory() -> int:
    """Return the free bytes of the device, to detect a leaked ring or encoder (together more than 1 GiB)."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free


@pytest.mark.parametrize("codec", ["deflate", "zstd", "raw"])
def test_every_dtype_and_odd_sizes_are_restored(folder: Path, codec: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"host": torch.randn(1000), "integers": torch.arange(3 * MIB, device="cuda")}
    for dtype in DTYPES:
        state |= {f"{dtype}.{name}": tensor for name, tensor in layouts(dtype).items()}
    state |= {
        "weights": weights(40 * MIB + 5),
        "never negative": weights(6 * MIB + 3, torch.float32).square(),
        "more than the ring in device memory": weights(100 * MIB, torch.float32),
        "not where four bytes begin": weights(MIB)[1:],
    }
    with LocalCluster(str(folder), memory=256 * MIB, codec=codec, process="node") as cluster:
        for step in range(2):
            version = cluster.save(state, step=step)
            check(cluster, state)
            if codec != "raw":
                assert version.tensors()["weights"].stored < 0.75 * version.tensors()["weights"].nbytes
    assert "is not available" not in caplog.text  # the node worker encoded


def test_two_ranks_save_at_once(cluster: LocalCluster) -> None:
    state = {f"layer{i}": weights(24 * MIB + i, torch.float32) for i in range(8)}
    for step in range(2):
        cluster.save_all([state, dict(state)], step=step)
        check(cluster, state)


def test_node_mode_works_with_expandable_segments() -> None:
    """The memory of torch cannot be exported with expandable segments; the memory of the ring can."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "odd_sizes and deflate or two_ranks", __file__],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


@pytest.mark.parametrize("broken", ["open", "signature"])
def test_without_ipc_the_training_process_encodes_with_a_warning(
    cluster: LocalCluster, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from raystow.workers.gpu.node_mode import device_ring

    def refused(handle: Any) -> int:
        raise ClusterError("not permitted here")

    if broken == "open":
        monkeypatch.setattr(device_ring, "_open", refused)
    else:
        monkeypatch.setattr(device_ring.DeviceRing, "signature", lambda ring: "00")
    state = {"w": weights(40 * MIB + 5), "host": torch.randn(1000)}
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            cluster.save(state, step=step)
            check(cluster, state)
    warnings = [record.getMessage() for record in caplog.records if "is not available" in record.getMessage()]
    assert len(warnings) == 1
    assert "not permitted here" in warnings[0] if broken == "open" else "is not what the training process reads" in warnings[0]


def train(address: str, opening: OpenSession, layers: int) -> None:
    """Run a training process that saves until it is killed."""
    state = {f"layer{i}": weights(64 * MIB, torch.float32) for i in range(layers)}
    staging = Staging(address, replace(opening, pid=os.getpid(), process="node"))
    plan = plan_save(state, rank=opening.rank, world_size=opening.world_size)
    staging.submit(SaveOrder(first_save(opening, step=1), plan, SaveProgress(1), lambda outcome: None))
    threading.Event().wait(600)


def test_a_killed_training_process_leaks_no_device_memory(cluster: LocalCluster) -> None:
    small = {"w": weights(40 * MIB)}
    cluster.save(small, step=0)  # creates the CUDA context of the node worker, which stays; later memory must be freed
    check(cluster, small)
    free = free_memory()
    training = multiprocessing.get_context("spawn").Process(target=train, args=(cluster.address(0), cluster.opening(1, 2), 32))
    training.start()
    attempts, its = cluster.coordinator._attempts, list[Any]()

    def begun() -> bool:
        its.extend(attempt for attempt in list(attempts.values()) if 1 in attempt.ranks)
        return bool(its)

    wait_until(begun, "rank 1 begins its save", 120)
    training.kill()  # while 8 GiB are being transferred
    training.join()
    wait_until(lambda: its[0].phase.over, "the save fails")
    assert its[0].reason == f"rank 1 (process {training.pid}) died while it was staging"
    cluster._stagings.pop(0)[1].close()  # a run of another world size has begun: this one begins again
    cluster.save(small, step=2)
    check(cluster, small)
    wait_until(lambda: free - free_memory() < 128 * MIB, "device memory comes back")


def test_a_killed_node_worker_fails_one_save_only(cluster: LocalCluster) -> None:
    state = {f"layer{i}": weights(64 * MIB, torch.float32) for i in range(32)}
    cluster.save({"w": state["layer0"]}, step=0)
    check(cluster, {"w": state["layer0"]})
    free = free_memory()
    attempts = cluster.coordinator._attempts

    def kill() -> None:
        wait_until(lambda: any(attempt.step == 1 for attempt in list(attempts.values())), "the save begins")
        cluster.kill_node(0)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(raystow.SaveFailed, match="node worker"):
        cluster.save(state, step=1)  # 8 GiB: the node worker is killed long before the end
    killing.join()
    part = {f"layer{i}": state[f"layer{i}"] for i in range(4)}
    cluster.save(part, step=2)
    check(cluster, part)
    wait_until(lambda: free - free_memory() < 128 * MIB, "device memory comes back")
