"""Runs the demo's cluster and its two trainings: ``python -m raystow.demo.run SETTINGS``, which are JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer

from ..storage.runtime import background
from ..storage.runtime.clock import SYSTEM
from .events import EventReader, log_event
from .settings import DISTURBED, RAY_TRAIN, WORKERS, DemoSettings
from .train_loop import train


class Watcher(ray.train.UserCallback):
    """Records, in Ray Train's controller, when it detects a failure."""

    def __init__(self, events: Path, run: str) -> None:
        self._events, self._run = events, run

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        log_event(self._events, "detected", run=self._run, ranks=sorted(worker_exceptions))


def main(settings: DemoSettings) -> None:
    """Start a head and a node per worker, train without a failure, then train again and kill a node."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(WORKERS):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    log_event(settings.events, "cluster")
    background.start("raystow-demo", replace_dead_node, cluster.address, settings.events)
    for run in settings.stores:
        log_event(settings.events, "run", run=run)
        TorchTrainer(
            train,
            train_loop_config={"settings": settings, "run": run, "strike": settings.strike if run == DISTURBED else 0},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(
                name=run,
                storage_path=str(Path(settings.folder) / RAY_TRAIN),
                failure_config=ray.train.FailureConfig(max_failures=2),
                callbacks=[Watcher(settings.events, run)],
            ),
        ).fit()
        log_event(settings.events, "finished", run=run)


def replace_dead_node(address: str, events: Path) -> None:
    """Start another node when one has died, as an autoscaler does."""
    follower = EventReader(events)
    while not any(event["event"] == "killed" for event in follower.news()):
        SYSTEM.sleep(0.1)
    options = ["--num-cpus=1", "--include-log-monitor=false", "--dashboard-agent-listen-port=0", "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", *options]
    subprocess.Popen(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(DemoSettings(**json.loads(sys.argv[1])))
    os._exit(0)  # versions are durable, and the caller kills the rest of the cluster
