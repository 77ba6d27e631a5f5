"""Runs the demo's cluster and its two trainings: ``python -m raystow.orchestrator.demo.run CONFIG``.

``CONFIG`` is JSON: ``folder``, ``events``, ``stores`` (run -> URI), ``steps``, ``every``, ``batch``, ``strike``, ``workers``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer

from ...storage.clock import SYSTEM
from .events import EventLog, EventReader
from .train_loop import train


class Watcher(ray.train.UserCallback):
    """Records, in Ray Train's controller, when it detects a failure."""

    def __init__(self, events: str, run: str) -> None:
        self._events, self._run = events, run

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        EventLog(self._events).write("detected", run=self._run, ranks=sorted(worker_exceptions))


def main(config: dict[str, Any]) -> None:
    """Start a head and a node per worker, train without a failure, then train again and kill a node."""
    journal = EventLog(config["events"])
    journal.write("cluster", stage="starting", workers=config["workers"])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(config["workers"]):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    journal.write("cluster", stage="ready", nodes=config["workers"])
    threading.Thread(target=replace_dead_node, args=(cluster.address, config["events"]), daemon=True).start()
    for run, uri in config["stores"].items():
        journal.write("run", run=run)
        options = {name: config[name] for name in ("events", "steps", "every", "batch")}
        strike = config["strike"] if run == "disturbed" else 0
        TorchTrainer(
            train,
            train_loop_config={**options, "uri": uri, "run": run, "strike": strike},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(
                name=run,
                storage_path=str(Path(config["folder"]) / "ray-train"),
                failure_config=ray.train.FailureConfig(max_failures=2),
                callbacks=[Watcher(config["events"], run)],
            ),
        ).fit()
        journal.write("finished", run=run)


def replace_dead_node(address: str, events: str) -> None:
    """Start another node when one has died, as an autoscaler does."""
    follower = EventReader(events)
    while not any(event["event"] == "killed" for event in follower.news()):
        SYSTEM.sleep(0.1)
    start = [
        "start",
        f"--address={address}",
        "--num-cpus=1",
        "--include-log-monitor=false",
        "--dashboard-agent-listen-port=0",
        "--block",
    ]
    subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", *start], stdout=subprocess.DEVNULL)
    EventLog(events).write("replaced")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # versions are durable, and the caller kills the rest of the cluster
