"""``raystow demo``: runs the cluster in a process of its own, shows its progress, and compares the results."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...storage.clock import SYSTEM
from ...storage.errors import ClusterError, NotARepository, StateError, Unsupported
from ...storage.repository import open_repository
from ...storage.stores import open_store
from ..cli.output import out
from .events import Event, EventReader

RUNS = ("undisturbed", "disturbed")
_WORKERS = 2


def demo(
    store: Annotated[
        str, typer.Option(metavar="URI", help="Place for the repositories: s3://bucket/prefix or a folder.")
    ] = "raystow-demo",
    steps: Annotated[int, typer.Option(min=8, metavar="N", help="Steps of each training.")] = 24,
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between saves.")] = 4,
) -> None:
    """Train on a Ray cluster, kill a node during a save, and compare the results bit for bit.

    Starts two Ray nodes on this machine and trains a GPT of 6.5 million parameters with FSDP2 twice, the second time killing a
    node during a save. Exits with 1 if the final weights or the losses after the restore differ. Takes about two minutes on two
    cores. The folder keeps logs and versions until the next demo. Ctrl-C ends all processes and deletes unfinished saves.
    Requires pip install "raystow[train]".

    Example:  raystow demo --store s3://bucket/raystow-demo
    """
    _require_training()
    folder = _prepare(store)
    remote = "://" in store and not store.startswith("file:")
    stores = {run: f"{store.rstrip('/')}/demo-{SYSTEM.token()}/{run}" if remote else str(folder / run) for run in RUNS}
    events = folder / "events"
    events.mkdir()
    strike = max(2 * every, (steps * 2 // 3) // every * every)
    config = {
        "folder": str(folder),
        "events": str(events),
        "stores": {run: open_store(uri).uri for run, uri in stores.items()},
        "steps": steps,
        "every": every,
        "batch": 4,
        "strike": strike,
        "workers": _WORKERS,
    }
    follower = EventReader(str(events))
    try:
        _watch(config, follower)
    finally:
        for uri in stores.values():
            _delete_unfinished(uri)
    _compare(stores, follower)


def _require_training() -> None:
    missing = [name for name in ("psutil", "ray", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(f"the demo needs {', '.join(missing)}", remedy='pip install "raystow[train]"')


def _prepare(store: str) -> Path:
    """Create an empty folder for events, logs and local versions; the folder of an earlier demo is emptied."""
    local = Path(store.removeprefix("file://")) if "://" not in store or store.startswith("file://") else Path("raystow-demo")
    mark = local / "config.json"
    if local.exists() and any(local.iterdir()) and not mark.exists():
        raise StateError("is not empty and not from a demo", subject=str(local), remedy="use another folder with --store")
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True)
    return local.resolve()


def _watch(config: dict[str, Any], follower: EventReader) -> None:
    """Run the cluster's process to its end, and show its events."""
    from .process import cluster_process

    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with cluster_process(config) as process, Progress(*columns, console=out) as progress:
        screen = _Screen(progress, config["steps"])
        while True:
            ended = process.poll() is not None
            for event in follower.news():
                screen.show(event)
            if ended:
                break
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                pass
    if process.returncode:
        log = Path(config["folder"]) / "log.txt"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ClusterError(f"the cluster's process ended with {process.returncode}:\n{tail}", subject=str(log))


class _Screen:
    """A progress bar for the cluster and for each run, and a line for each notable event."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._cluster = progress.add_task("starting a Ray cluster of two nodes", total=_WORKERS, note="")
        self._bars: dict[str, TaskID] = {}

    def show(self, event: Event) -> None:
        """Show one event."""
        kind, run = event["event"], event.get("run", "")
        if kind == "cluster" and event["stage"] == "ready":
            self._progress.update(self._cluster, completed=event["nodes"], description="Ray cluster of two nodes and a head")
            self._progress.stop_task(self._cluster)
        elif kind == "run":
            title = "training without a failure" if run == "undisturbed" else "training again, with a failure"
            self._progress.console.print(title, style="bold")  # bars are below the lines or, without a terminal, at the end
            self._bars[run] = self._progress.add_task(title, total=self._steps, note="starting workers")
        elif kind == "step" and event["rank"] == 0:
            self._progress.update(self._bars[run], completed=event["step"], note=f"loss {event['loss']:.2f}")
        elif kind == "finished":
            self._progress.stop_task(self._bars[run])
        elif kind == "durable" and event["rank"] == 0:
            self._progress.console.print(f"  version {event['version']} (step {event['step']}) is durable", style="dim")
        elif kind == "failed" and event["rank"] == 0:
            self._progress.console.print(
                f"  the save of step {event['step']} failed: {event['reason']}", style="yellow", markup=False
            )
        elif kind == "killed":
            self._progress.update(self._bars[run], note="node lost")
            self._progress.console.print(f"  killed a node during the save of step {event['step']}", style="bold red")
        elif kind == "detected":
            self._progress.console.print("  Ray Train detected the failure and restarts the workers", style="yellow")
        elif kind == "restored" and event["rank"] == 0:
            self._progress.console.print(f"  restored from version {event['version']}, step {event['step']}", style="green")


def _delete_unfinished(uri: str) -> None:
    """Delete the objects of unfinished saves. All writers have ended, so none is in progress."""
    try:
        repository = open_repository(uri)
    except NotARepository:
        return
    repository.plan_collection(grace=0).execute()


def _compare(stores: dict[str, str], follower: EventReader) -> None:
    from .outcome import compare, failure
    from .summary import summary

    undisturbed, disturbed = (open_repository(stores[run]) for run in RUNS)
    result = compare(undisturbed, disturbed, follower.seen)
    out.print()
    for part in summary(disturbed, follower.seen, failure(follower.seen), result):
        out.print(part)
    if not result.same:
        raise typer.Exit(1)
