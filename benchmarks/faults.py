"""Run one script of faults against raystow and other checkpointers, on the same S3 server.

Two ranks train and save a replicated state after each step; a save counts when it is durable. Each saver meets each fault:

- *SlowDown*: every write is answered with 503 for 8 s.
- *stall*: nobody reads the bodies of the next two writes, and nobody answers.
- *cut body*: the connection breaks in the middle of the bodies of the next two writes.
- *kill of a rank*: SIGKILL while it saves. The launcher then ends the other rank and starts both again, as torchrun does.

Writes are those of tensors, not of metadata. Each library is used as its documentation does, and no error of a save is caught: an
exception ends the training, and the launcher starts it again. Outcomes: *hung* (nothing durable for ``--patience`` seconds),
*crashed* (the training ended with an exception), *lost* (steps before the fault that were durable and were not restored), *wrong*
(restored bits are others), and the seconds from the fault to the next durable save.

Savers that are not installed are left out by name: the peers need ``s3fs`` and ``s3torchconnector``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import report
import typer
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from s3_faults.faults import Fault, Rule  # noqa: E402
from s3_faults.proxy import FaultProxy  # noqa: E402
from s3_server import make_bucket, s3_server  # noqa: E402

BUCKET, REGION, RANKS, NUMBERS, STEP = "raystow-faults", "us-east-1", 2, 2_000_000, 0.2
FAULTS = ("SlowDown", "stall", "cut body", "kill of a rank")
WRITES = r"\.pack|\.distcp"
NEEDED = {"raystow": "raystow", "DCP with s3fs": "s3fs", "DCP with s3torchconnector": "s3torchconnector"}
LEFT_OUT = {
    "torch_checkpointing": "its release 0.1.1 has a file-system writer only",
    "ray.train.report": "the script starts its ranks itself, and Ray Train starts its own",
}


class Saver(Protocol):
    """One library, in one rank."""

    def restore(self, state: dict[str, Any]) -> int:
        """Fill the state from the newest checkpoint; return its step, 0 if there is none."""

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save the state; return when it is durable."""


class Raystow:
    """raystow."""

    def __init__(self, uri: str, rank: int) -> None:
        import raystow

        self._checkpointer = raystow.Checkpointer(uri, rank=rank, world_size=RANKS)

    def restore(self, state: dict[str, Any]) -> int:
        """See ``Saver``."""
        version = self._checkpointer.restore_latest(into=state)
        return 0 if version is None else version.step

    def save(self, state: dict[str, Any], step: int) -> None:
        """See ``Saver``."""
        self._checkpointer.save(state, step=step).result()


class Dcp:
    """torch.distributed.checkpoint with a writer for S3, one folder for each step."""

    def __init__(self, uri: str, rank: int, kind: str) -> None:
        from torch import distributed

        distributed.init_process_group("gloo", init_method=os.environ["FAULTS_GROUP"], rank=rank, world_size=RANKS)
        self._uri, self._connector = uri, kind == "DCP with s3torchconnector"

    def _steps(self) -> list[int]:
        import boto3

        bucket, _, prefix = self._uri.removeprefix("s3://").partition("/")
        pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/.metadata"))

    def restore(self, state: dict[str, Any]) -> int:
        """See ``Saver``."""
        from torch.distributed import checkpoint

        steps = self._steps()
        if steps:
            checkpoint.load(state, storage_reader=self._end("Reader", f"{self._uri}/{steps[-1]}"))
        return steps[-1] if steps else 0

    def save(self, state: dict[str, Any], step: int) -> None:
        """See ``Saver``."""
        from torch.distributed import checkpoint

        checkpoint.save(state, storage_writer=self._end("Writer", f"{self._uri}/{step}"))

    def _end(self, end: str, path: str) -> Any:
        if self._connector:
            import s3torchconnector
            from s3torchconnector import dcp

            config = s3torchconnector.S3ClientConfig(force_path_style=True)
            return getattr(dcp, f"S3Storage{end}")(REGION, path, s3client_config=config)
        from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

        return getattr(fsspec, f"Fsspec{end}")(path)


def train(saver: str, uri: str, rank: int, log: Path) -> None:
    """Be one rank: restore, then save after each step, for ever. Every event is a line of ``log``."""
    import torch

    def note(event: str, step: int, **more: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"at": time.time(), "rank": rank, "event": event, "step": step, **more}) + "\n")

    made: Saver = Raystow(uri, rank) if saver == "raystow" else Dcp(uri, rank, saver)
    state = {"w": torch.zeros(NUMBERS), "step": torch.zeros((), dtype=torch.int64)}
    step = made.restore(state)
    whole = bool((state["w"] == values(step)).all()) and int(state["step"]) == step
    note("restored", step, whole=whole)
    while True:
        time.sleep(STEP)
        step += 1
        state["w"].copy_(values(step))
        state["step"].fill_(step)
        note("saving", step, pid=os.getpid())
        made.save(state, step)
        note("durable", step)


def values(step: int) -> Any:
    """Return the weights after a step."""
    import torch

    return torch.zeros(NUMBERS) if step == 0 else torch.randn(NUMBERS, generator=torch.Generator().manual_seed(step))


class Launcher:
    """Starts both ranks, again when one ends, and counts the ends that were no kill."""

    def __init__(self, saver: str, uri: str, folder: Path, cluster: RayCluster | None) -> None:
        self._saver, self._uri, self._folder, self._cluster = saver, uri, folder, cluster
        self.log, self.crashes, self._starts, self._killed = folder / "log.jsonl", 0, 0, False
        self.log.touch()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        """Start all ranks."""
        self._starts += 1
        group = {"FAULTS_GROUP": f"file://{self._folder}/group-{self._starts}"}
        for rank in range(RANKS):
            where = {} if self._cluster is None else self._cluster.environment()
            command = [sys.executable, __file__, "rank", self._saver, self._uri, str(rank), str(self.log)]
            errors = (self._folder / f"rank-{rank}.err").open("ab")
            self._ranks.append(subprocess.Popen(command, env={**os.environ, **group, **where}, stderr=errors))

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind so far."""
        return [line for line in map(json.loads, self.log.read_text().splitlines()) if line["event"] == event]

    def look(self) -> None:
        """Start all ranks again if one has ended."""
        if all(rank.poll() is None for rank in self._ranks):
            return
        self.crashes += not self._killed
        self._killed = False
        self.end()
        self.start()

    def kill(self) -> None:
        """Kill the last rank."""
        self._killed = True
        self._ranks[-1].kill()

    def end(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._ranks = []

    def until(self, reached: Callable[[], bool], patience: float) -> bool:
        """Look after the ranks until a condition holds; False if it does not in time."""
        end = time.monotonic() + patience
        while not reached():
            if time.monotonic() > end:
                return False
            self.look()
            time.sleep(0.05)
        return True


class RayCluster:
    """A Ray cluster of one node, for both ranks."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": RANKS, "include_dashboard": False})

    def environment(self) -> dict[str, str]:
        """Return the variables with which a process joins the cluster."""
        return {"RAY_ADDRESS": self._cluster.address}

    def end(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def measure(saver: str, fault: str, proxy: FaultProxy, patience: float) -> dict[str, Any]:
    """Let a saver meet a fault; return the outcome."""
    cluster = RayCluster() if saver == "raystow" else None
    with tempfile.TemporaryDirectory() as place:
        launcher = Launcher(saver, f"s3://{BUCKET}/{os.path.basename(place)}", Path(place), cluster)
        try:
            if not launcher.until(lambda: len(launcher.events("durable")) >= 3 * RANKS, 120):
                raise RuntimeError(f"{saver} saves nothing: {(Path(place) / 'rank-0.err').read_text()[-2000:]}")
            begun = len(launcher.events("saving"))
            launcher.until(lambda: len(launcher.events("saving")) > begun, 60)
            at, before = time.time(), _newest(launcher.events("durable"))
            restores = len(launcher.events("restored"))
            rule = _strike(fault, proxy, launcher)
            back = launcher.until(
                lambda: sum(one["step"] > before + 1 and one["at"] > at for one in launcher.events("durable")) >= RANKS, patience
            )
            proxy.heal()
            restored = launcher.events("restored")[restores:]
            after = [one["at"] for one in launcher.events("durable") if one["step"] > before and one["at"] > at]
            return {
                "requests hit": None if rule is None else rule.hits,
                "hung": not back,
                "crashed": launcher.crashes,
                "lost steps": max([0, *(before - one["step"] for one in restored)]),
                "wrong": sum(not one["whole"] for one in restored),
                "recovered after s": round(min(after) - at, 1) if after else None,
            }
        finally:
            launcher.end()
            proxy.heal()
            if cluster is not None:
                cluster.end()


def _newest(durable: list[dict[str, Any]]) -> int:
    return int(max(one["step"] for one in durable))


def _strike(fault: str, proxy: FaultProxy, launcher: Launcher) -> Rule | None:
    if fault == "SlowDown":
        rule = proxy.inject(Fault.SLOW_DOWN, "PUT|POST", WRITES, times=1 << 30)
        launcher.until(lambda: False, 8.0)
        proxy.heal()
        return rule
    if fault in ("stall", "cut body"):
        return proxy.inject(Fault.STALL_REQUEST if fault == "stall" else Fault.RESET_REQUEST, "PUT", WRITES, times=2)
    launcher.kill()
    return None


@contextlib.contextmanager
def _store() -> Iterator[FaultProxy]:
    with s3_server() as endpoint:
        make_bucket(BUCKET)
        server = urlsplit(endpoint)
        with FaultProxy(server.hostname or "", server.port or 80) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            yield proxy


app = typer.Typer(add_completion=False)


@app.command()
def rank(saver: str, uri: str, rank: int, log: Path) -> None:
    """Be one rank (started by ``run``)."""
    train(saver, uri, rank, log)


@app.command()
def run(
    saver: Annotated[list[str] | None, typer.Option(help="Only these savers.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only these faults.")] = None,
    patience: float = 200.0,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = Path("benchmarks/results"),
) -> None:
    """Measure all savers that are installed."""
    console, found = Console(), dict[str, dict[str, Any]]()
    missing = {name: f"{module} is not installed" for name, module in NEEDED.items() if importlib.util.find_spec(module) is None}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with _store() as proxy:
        for name in saver or [name for name in NEEDED if name not in missing]:
            for one in fault or FAULTS:
                found.setdefault(name, {})[one] = measure(name, one, proxy, patience)
                console.print(name, one, found[name][one])
    about = report.about("raystow", "torch", "ray", "s3fs", "s3torchconnector")
    report.write(console, out, "faults", {**about, "patience s": patience, "left out": {**LEFT_OUT, **missing}, "savers": found})


if __name__ == "__main__":
    app()
