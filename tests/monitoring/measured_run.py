"""A run on its own Ray cluster in which every measured event happens; it writes the metrics and logs that Ray exports.

python measured_run.py s3://bucket/prefix FOLDER     # AWS_ENDPOINT_URL and credentials in the environment; logs are JSON lines

``FOLDER/metrics.txt`` has the metrics that Prometheus would scrape, ``FOLDER/*.err`` the logs of each process.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
from helpers.polling import wait_until
from prometheus_client.parser import text_string_to_metric_families
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy

import raystow
from raystow.storage.format import keys
from raystow.storage.runtime import background
from raystow.storage.runtime.metrics import METRICS
from raystow.storage.stores import open_store

DEADLINE = 60.0


def model_and_moments(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(200_000, generator=generator)}, "optim": {"m": torch.randn(100_000, generator=generator)}}


def train(uri: str, proxy: FaultProxy) -> raystow.Checkpointer:
    export = raystow.Export("/dev/null/model")  # which fails
    saver = raystow.Checkpointer(uri, rank=0, world_size=1, timeout=30, export=export)
    saver.save(model_and_moments(1), step=1).result(60)
    proxy.inject(Fault.SLOW_DOWN, "GET", r"/root\.json")  # the reader retries
    stale = {**model_and_moments(2), "optim": model_and_moments(1)["optim"]}
    saver.save(stale, step=2)
    saver.fence()
    saver.close()
    with raystow.Checkpointer(uri, rank=0, world_size=2, timeout=1, on_failure="warn") as alone:
        alone.save(model_and_moments(3), step=3)  # rank 1 does not exist
    save_on_two_ranks(uri)
    last = raystow.Checkpointer(uri, rank=0, world_size=1, timeout=30, memory=raystow.Memory(cache=0, journal=5_000))
    last.save(model_and_moments(4), step=5).result(60)
    cut_a_pack(uri)
    last.restore_latest(into=model_and_moments(0))
    record_steps(last)
    background.ErrorLog("raystow-measured").note(RuntimeError("what nobody has thought of"))
    return last


def save_on_two_ranks(uri: str) -> None:
    """Save a state of which one rank has other bits."""
    with raystow.Checkpointer(uri, rank=0, world_size=2) as first, raystow.Checkpointer(uri, rank=1, world_size=2) as second:
        one, other = model_and_moments(5), model_and_moments(5)
        other["model"]["w"][7] += 1
        for saver, state in ((first, one), (second, other)):
            saver.save(state, step=4)


def record_steps(saver: raystow.Checkpointer) -> None:
    """Record steps until their memory is full."""
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    journal = saver.journal(model, optimizer)
    journal.replay()
    for step in range(10, 20):
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
        journal.record(step)
    wait_until(lambda: journal.save_advised, "the memory is full")


def cut_a_pack(uri: str) -> None:
    """Damage the newest version."""
    version, store = raystow.open(uri).versions()[-1], open_store(uri)
    key = next(info.key for info in store.list(keys.prefix(version.id, version.attempt)) if info.key.endswith(".pack"))
    store.put(key, [store.get(key, max_bytes=1 << 30)[:-1]])


def scrape() -> str:
    pages = []
    for node in ray.nodes():
        with urllib.request.urlopen(
            f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10
        ) as page:
            pages.append(page.read().decode())
    return "\n".join(pages)


def exported(page: str) -> set[str]:
    """Return the names of the metrics on a page, without Ray's prefix and without suffixes of Prometheus' client."""
    return {family.name.removeprefix("ray_") for family in text_string_to_metric_families(page)}


def main(uri: str, folder: Path) -> None:
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with FaultProxy(server.hostname or "", server.port or 80) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        fast = {"metrics_report_interval_ms": 1000}
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=fast)
        saver = train(uri, proxy)
        page, missing = "", set[str]()

        def all_exported() -> bool:
            nonlocal page, missing
            page = scrape()
            missing = {metric.name for metric in METRICS} - exported(page)
            return not missing

        wait_until(all_exported, lambda: f"exported: {sorted(missing)}", DEADLINE, pause=0.5)
        (folder / "metrics.txt").write_text(page)
        saver.close()
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        for path in logs.glob("worker-*.err"):
            shutil.copy(path, folder / path.name)
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
