"""Run the same faults against raystow and other checkpointers, on the same S3 server.

Two ranks train and save a replicated state after each step; a save counts when it is durable. Each saver meets each fault:

- *SlowDown*: every write is answered with 503 for 8 s.
- *stall*: the server does not read the bodies of the next two writes and does not answer.
- *cut body*: the connection breaks in the middle of the bodies of the next two writes.
- *kill of a rank*: SIGKILL while it saves. The other rank is then ended and both are restarted, as torchrun and Ray Train do.
- *kill of a node*: SIGKILL to a rank and all processes of its Ray node, while it saves. Without Ray, a node is a rank.

Writes are those of tensors, not of metadata. Each library is used as its documentation does, with its default settings, and no
error of a save is caught: an exception ends the training, which is then restarted. Outcomes: *hung* (nothing durable for
``--patience`` seconds), *crashed* (number of trainings that ended with an exception), *lost* (steps that were reported as durable
to all ranks and were not restored), *wrong* (restores of other bits), and the seconds from the fault to the next save
that is durable for all ranks. The result file has the reason of each bad outcome.

Savers that are not installed are skipped with a message: the peers need ``s3fs`` and ``s3torchconnector``. ``RAYSTOW_TEST_S3`` is
the address of the server, as in the tests (``tools/ceph_s3.sh`` starts one).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import boto3
import report
import typer
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import fault_ranks  # noqa: E402
from fault_launchers import LAUNCHERS, Event, Launcher, Processes  # noqa: E402
from fault_ranks import RANKS, SAVERS, Place  # noqa: E402
from helpers.s3_server import make_bucket, s3_server  # noqa: E402
from s3_faults.faults import Fault, Rule  # noqa: E402
from s3_faults.proxy import FaultProxy  # noqa: E402

BUCKET = "raystow-faults"
FAULTS = ("SlowDown", "stall", "cut body", "kill of a rank", "kill of a node")
WRITES = r"\.pack|\.distcp|\.pt"
NEEDED = {"DCP with s3fs": "s3fs", "DCP with s3torchconnector": "s3torchconnector"}
LEFT_OUT = {"torch_checkpointing": "its release 0.1.1 writes to file systems only"}


def measure(saver: str, fault: str, proxy: FaultProxy, patience: float) -> dict[str, Any]:
    """Run a saver with a fault; return the outcome."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        launcher = LAUNCHERS.get(saver, Processes)(saver, f"s3://{BUCKET}/{folder.name}", folder)
        try:
            launcher.start()
            if not launcher.until(lambda: len(_durable(launcher.events("durable"))) >= 3, 180):
                raise RuntimeError(f"{saver} saves nothing: {launcher.events('crashed')[:1]}")
            begun = len(launcher.events("saving"))
            launcher.until(lambda: len(launcher.events("saving")) > begun, 60)
            return _outcome(launcher, fault, proxy, patience)
        finally:
            proxy.heal()
            launcher.close()


def _outcome(launcher: Launcher, fault: str, proxy: FaultProxy, patience: float) -> dict[str, Any]:
    at, crashed, earlier = time.time(), launcher.crashes, len(launcher.events("restored"))
    before = max(_durable(launcher.events("durable")))
    rule = _strike(fault, proxy, launcher)

    def later() -> dict[int, float]:
        found = _durable([one for one in launcher.events("durable") if one["at"] > at])
        return {step: when for step, when in found.items() if step > before}

    back = launcher.until(lambda: len(later()) >= 2, patience)
    reasons = [] if back else launcher.stacks()
    proxy.heal()
    lost, restored = 0, launcher.events("restored")[earlier:]
    for one in restored:
        newest = max(_durable([durable for durable in launcher.events("durable") if durable["at"] < one["at"]]))
        if newest - one["step"] > lost:
            lost = newest - one["step"]
            reasons.append(f"step {newest} was reported as durable to all ranks, and step {one['step']} was restored")
    crashes = launcher.crashes - crashed
    if crashes:
        reasons += sorted({f"rank {one['rank']}: {one['reason']}" for one in launcher.events("crashed") if one["at"] > at})
    return {
        "requests hit": None if rule is None else rule.hits,
        "hung": not back,
        "crashed": crashes,
        "lost steps": lost,
        "wrong": sum(not one["whole"] for one in restored),
        "recovered after s": round(min(later().values()) - at, 1) if later() else None,
        "reasons": reasons,
    }


def _durable(events: list[Event]) -> dict[int, float]:
    """Return for each step the time at which the last rank learned that the step is durable."""
    acknowledged: dict[int, dict[int, float]] = {}
    for one in events:
        acknowledged.setdefault(one["step"], {}).setdefault(one["rank"], one["at"])
    return {step: max(when.values()) for step, when in acknowledged.items() if len(when) == RANKS}


def _strike(fault: str, proxy: FaultProxy, launcher: Launcher) -> Rule | None:
    if fault == "SlowDown":
        rule = proxy.inject(Fault.SLOW_DOWN, "PUT|POST", WRITES, times=1 << 30)
        launcher.until(lambda: False, 8.0)
        proxy.heal()
        return rule
    if fault in ("stall", "cut body"):
        return proxy.inject(Fault.STALL_REQUEST if fault == "stall" else Fault.RESET_REQUEST, "PUT", WRITES, times=2)
    if fault == "kill of a rank":
        launcher.kill_rank()
    else:
        launcher.kill_node()
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
def rank(saver: str, uri: str, rank: int, folder: Path) -> None:
    """Run one rank (started by ``run``)."""
    fault_ranks.run(Place(saver, uri, rank, folder))


@app.command()
def ray_train(uri: str, folder: Path) -> None:
    """Run the driver of a training by Ray Train (started by ``run``)."""
    fault_ranks.run_in_ray_train(uri, folder)


@app.command()
def run(
    saver: Annotated[list[str] | None, typer.Option(help="Only these savers.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only these faults.")] = None,
    patience: float = 200.0,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = Path("benchmarks/results"),
) -> None:
    """Measure all savers that are installed."""
    console, found = Console(), dict[str, dict[str, Any]]()
    savers, faults = report.chosen(saver, SAVERS), report.chosen(fault, FAULTS)
    missing = {name: f"{module} is not installed" for name, module in NEEDED.items() if importlib.util.find_spec(module) is None}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Processes of Ray import the modules of this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    about = report.about("raystow", "torch", "ray", *(NEEDED[name] for name in NEEDED if name not in missing))
    with _store() as proxy:
        server = boto3.client("s3").head_bucket(Bucket=BUCKET)["ResponseMetadata"]["HTTPHeaders"].get("server")
        for name in savers if saver else [name for name in SAVERS if name not in missing]:
            for one in faults:
                found.setdefault(name, {})[one] = measure(name, one, proxy, patience)
                console.print(name, one, found[name][one])
    results = {**about, "server": server, "patience s": patience, "left out": {**LEFT_OUT, **missing}, "savers": found}
    report.write(console, out, "faults", results)


if __name__ == "__main__":
    app()
