"""Runs of Ray Train whose states are known in advance, on nodes of the test cluster that may die."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from helpers.polling import wait_until
from ray.cluster_utils import Cluster

import raystow
from raystow.storage.runtime.clock import SYSTEM

DEADLINE = 120.0
SIZE = 1001
SPARE = "spare"


def advance(w: torch.Tensor, step: int) -> None:
    """Apply one training step. Each bit depends on all earlier steps; the operation is elementwise, so every world size
    agrees."""
    w.mul_(0.997).add_(torch.sin(w + step))


def expected(step: int) -> torch.Tensor:
    """Return the whole of ``w`` after ``step`` steps."""
    w = torch.zeros(SIZE)
    for one in range(1, step + 1):
        advance(w, one)
    return w


def check(version: raystow.Version) -> None:
    """Assert that the tensor of a version equals the expected one, bit for bit."""
    assert torch.equal(version.read("w"), expected(version.step))


class Run:
    """Notes in a folder through which tests and ranks communicate: finished steps, starts of worker groups, and commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str) -> None:
        (self.folder / name).touch()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def starts(self) -> list[tuple[int, int, str]]:
        """For each worker group that has started, return its first step, its world size, and the node of its last rank."""
        notes = sorted(self.folder.glob("start-*"), key=lambda path: path.stat().st_mtime_ns)
        return [(int(step), int(world), node) for _, step, world, node, _ in (path.name.split("-") for path in notes)]

    def reached(self) -> int:
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("step-*")), default=0)


def train(config: dict[str, Any]) -> None:
    """Train to ``steps``, and save every step, or with ``notice`` only on a preemption notice.

    Other keys of ``config``: ``options`` of the Checkpointer; ``die``, the step at which the last rank dies, once; ``hold``, the
    step at which all ranks wait for the note ``go``; ``wait``, whether to wait for each version; ``pace``, seconds per step.
    """
    import ray.train
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    run, world = Run(Path(config["folder"])), ray.train.get_context().get_world_size()
    w = distribute_tensor(torch.zeros(SIZE), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {"w": w, "step": 0}
    with raystow.ray_train.Checkpointer(**config.get("options", {})) as checkpointer:
        checkpointer.restore_latest(into=state)
        last = checkpointer.rank == world - 1
        if last:
            node = ray.get_runtime_context().get_node_id()
            run.note(f"start-{state['step']}-{world}-{node}-{SYSTEM.token()}")
        while state["step"] < config["steps"]:
            checkpointer.fence()
            state["step"] += 1
            advance(w.to_local(), state["step"])
            SYSTEM.sleep(config.get("pace", 0.0))  # simulates the duration of a real step
            if config.get("notice"):
                if checkpointer.due(state["step"], raystow.Interval(steps=10**9)):
                    checkpointer.save(state, step=state["step"]).result(DEADLINE)
                    run.note("saved-on-notice")
            else:
                pending = checkpointer.save(state, step=state["step"], metrics={"score": score(state["step"])})
                if config.get("wait"):
                    with contextlib.suppress(raystow.SaveFailed):
                        pending.result(DEADLINE)
            if last:
                run.note(f"step-{state['step']}")
                if state["step"] == config.get("die") and not run.has("died"):
                    pending.result(DEADLINE)
                    run.note("died")
                    os._exit(1)
            if state["step"] == config.get("hold"):
                wait_until(lambda: run.has("go"), "the note go of the test")
        if config.get("notice"):
            checkpointer.save(state, step=state["step"])


def score(step: int) -> float:
    """Return a metric that rises and falls."""
    return float((step * 7) % 5)


def trainer(folder: Path, config: dict[str, Any], *, workers: int | tuple[int, int] = 2, on: str = "", **checkpoints: Any) -> Any:
    """Return a trainer of the run "run" in ``folder``. ``on``: a resource of its nodes. ``checkpoints``:
    ``CheckpointConfig``'s, and ``function``, which trains instead of ``train``."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder.mkdir(exist_ok=True)
    function = checkpoints.pop("function", train)
    validation, failures = checkpoints.pop("validation", None), checkpoints.pop("max_failures", 3)
    resources = {"CPU": 1.0, **({on: 1.0} if on else {})}
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(folder), **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=resources, elastic_resize_monitor_interval_s=2.0),
        run_config=RunConfig(
            name="run",
            storage_path=checkpoints.pop("storage_path", str(folder / "ray")),
            storage_filesystem=checkpoints.pop("storage_filesystem", None),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(**checkpoints),
        ),
        **({"validation_config": validation} if validation else {}),
    )


class Spares:
    """Nodes of one CPU each with the resource ``spare``, added and removed by tests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.nodes = cluster, list[Any]()

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, resources={SPARE: 1}))

    def of(self, id: str) -> Any:
        """Return the node with this id, and remove it from the list of spare nodes."""
        node = next(node for node in self.nodes if node.node_id == id)
        self.nodes.remove(node)
        return node


def kill(cluster: Cluster, node: Any) -> None:
    """Send SIGKILL to all processes of a node, as if its machine lost power."""
    for info in [info for infos in node.all_processes.values() for info in infos]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(info.process.pid)
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    cluster.remove_node(node, allow_graceful=False)


def drain(cluster: Cluster, node: Any, seconds: float) -> None:
    """Drain a node, as on a cloud's preemption notice; ``ray drain-node`` makes the same call."""
    reason = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((SYSTEM.now() + seconds) * 1000)
    accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, reason, "spot instance", deadline)
    assert accepted, why
