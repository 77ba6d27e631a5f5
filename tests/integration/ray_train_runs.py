"""Runs of Ray Train whose every state is known in advance, on nodes of the test cluster that may die."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from polling import wait_until
from ray.cluster_utils import Cluster

import raystow
from raystow.storage.clock import SYSTEM

DEADLINE = 120.0
SIZE = 1001


def advance(w: torch.Tensor, step: int) -> None:
    """A step of training, whose every bit depends on all steps before; element by element, so alike on any number of ranks."""
    w.mul_(0.997).add_(torch.sin(w + step))


def expected(step: int) -> torch.Tensor:
    """The whole of ``w`` after so many steps."""
    w = torch.zeros(SIZE)
    for one in range(1, step + 1):
        advance(w, one)
    return w


def check(version: raystow.Version) -> None:
    """What a version holds is what it must be, bit for bit."""
    assert torch.equal(version.read("w"), expected(version.step))


class Run:
    """What tests know of a run by a folder: which steps were done, and where; and what it is to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str) -> None:
        (self.folder / name).touch()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def starts(self) -> list[tuple[int, int, str]]:
        """For each worker group that has begun: the step it went on from, its world size, and the node of its last rank."""
        notes = sorted(self.folder.glob("start-*"), key=lambda path: path.stat().st_mtime_ns)
        return [(int(step), int(world), node) for _, step, world, node, _ in (path.name.split("-") for path in notes)]

    def reached(self) -> int:
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("step-*")), default=0)


def train(config: dict[str, Any]) -> None:
    """Train to ``steps``, and save every step, or with ``notice`` when a node is to go. ``options``: the Checkpointer's. ``die``:
    the step at which the last rank dies, the first time. ``hold``: the step at which all wait until the note ``go`` is there.
    ``wait``: for each version. ``pace``: seconds for each step."""
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
            SYSTEM.sleep(config.get("pace", 0.0))  # stands for the time that a real step takes
            if config.get("notice"):
                noticed = checkpointer.preempted()
                if noticed or state["step"] == 1:  # at first, so that the node worker is there: on a node to go, none is started
                    checkpointer.save(state, step=state["step"]).result(DEADLINE)
                if noticed and last:
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
                wait_until(lambda: run.has("go"), "the test says go")
        if config.get("notice"):
            checkpointer.save(state, step=state["step"])


def score(step: int) -> float:
    """A metric that goes up and down."""
    return float((step * 7) % 5)


def trainer(folder: Path, config: dict[str, Any], *, workers: int | tuple[int, int] = 2, on: str = "", **checkpoints: Any) -> Any:
    """A trainer of the run "run" in ``folder``. ``on``: a resource of its nodes. ``checkpoints``: ``CheckpointConfig``'s."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder.mkdir(exist_ok=True)
    validation = checkpoints.pop("validation", None)
    resources = {"CPU": 1.0, **({on: 1.0} if on else {})}
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=resources, elastic_resize_monitor_interval_s=2.0),
        run_config=RunConfig(
            name="run",
            storage_path=checkpoints.pop("storage_path", str(folder / "ray")),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(**checkpoints),
        ),
        **({"validation_config": validation} if validation else {}),
    )


def kill(cluster: Cluster, node: Any) -> None:
    """As when a machine loses power: SIGKILL to everything that runs on a node."""
    for info in [info for infos in node.all_processes.values() for info in infos]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(info.process.pid)
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    cluster.remove_node(node, allow_graceful=False)


def drain(cluster: Cluster, node: Any, seconds: float) -> None:
    """What a cloud's notice comes to: ``ray drain-node`` does this call."""
    reason = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((SYSTEM.now() + seconds) * 1000)
    accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, reason, "spot instance", deadline)
    assert accepted, why
