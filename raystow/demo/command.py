"""``raystow demo``: runs the cluster in a process of its own, shows its progress, and compares the results."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..cli.options import number
from ..cli.output import out
from ..storage.errors import ClusterError, NotARepository, StateError
from ..storage.repository import open_repository
from ..storage.runtime.clock import SYSTEM
from ..storage.stores import open_store
from .events import Event, EventReader
from .settings import EVENTS, RAY_TRAIN, RUNS, UNDISTURBED, WORKERS, DemoSettings

_LOG = "log.txt"


def demo(
    store: Annotated[
        str, typer.Option(metavar="URI", help="Place for the repositories: s3://bucket/prefix or a folder.")
    ] = "raystow-demo",
    steps: Annotated[int, number(min=8, help="Steps of each training.")] = 24,
    every: Annotated[int, number(help="Steps between saves.")] = 4,
) -> None:
    """Train on a Ray cluster, kill a node during a save, and compare the results bit for bit.

    No step is lost: steps after the last version are replayed from the journal.

    Starts two Ray nodes on this machine and trains a GPT of 6.5 million parameters with FSDP2 twice, the second time killing a
    node during a save. Exits with 1 if the final weights or the losses after the restore differ. Takes about two minutes on two
    cores. The folder keeps logs and versions until the next demo. Ctrl-C ends all processes and deletes unfinished saves.
    Requires pip install "raystow[train]".

    Example:  raystow demo --store s3://bucket/raystow-demo
    """
    if steps <= 2 * every:
        raise typer.BadParameter("--steps must be more than twice --every: a node is killed during a later save than the first")
    from .process import cluster_process  # raises if a library is missing, before an earlier demo is deleted

    uri = open_store(store).uri
    local = urlsplit(uri).scheme == "file"
    folder = _prepare(Path(unquote(urlsplit(uri).path)) if local else Path("raystow-demo"))
    place = str(folder) if local else f"{uri}/demo-{SYSTEM.token()}"
    settings = DemoSettings(str(folder), {run: open_store(f"{place}/{run}").uri for run in RUNS}, steps, every)
    settings.events.mkdir()
    follower = EventReader(settings.events)
    try:
        _watch(cluster_process(settings, Path(settings.folder) / _LOG), settings, follower)
    finally:
        for uri in settings.stores.values():
            _delete_unfinished(uri)
    _compare(settings.stores, follower)


def _prepare(folder: Path) -> Path:
    """Create an empty folder for events, logs and local versions. Those of an earlier demo are deleted, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {path.name: path for path in folder.iterdir()}
    if found and not (EVENTS in found and found.keys() <= {EVENTS, RAY_TRAIN, _LOG, *RUNS}):
        raise StateError("is not empty and not from a demo", subject=str(folder), remedy="use another folder with --store")
    for name, path in found.items():
        path.unlink() if name == _LOG else shutil.rmtree(path)
    return folder.resolve()


def _watch(
    cluster: contextlib.AbstractContextManager[subprocess.Popen[bytes]], settings: DemoSettings, follower: EventReader
) -> None:
    """Run the cluster's process to its end, and show its events."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with cluster as process, Progress(*columns, console=out) as progress:
        screen = _Screen(progress, settings.steps)
        ended = False
        while not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            ended = process.poll() is not None
            for event in follower.news():
                screen.show(event)
    if process.returncode:
        log = Path(settings.folder) / _LOG
        last = (log.read_text(errors="replace").strip().splitlines() or ["without output"])[-1]
        what = f"the cluster's process ended with {process.returncode}: {last}"
        raise ClusterError(what, subject=str(log), remedy="read the whole file")


class _Screen:
    """A progress bar for the cluster and for each run, and a line for each notable event."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._print = progress.console.print  # bars are below the lines or, without a terminal, at the end
        self._cluster = progress.add_task("starting a Ray cluster of two nodes", total=WORKERS, note="")
        self._bars: dict[str, TaskID] = {}

    def show(self, event: Event) -> None:
        """Show one event; those of all ranks only once."""
        match event:
            case {"rank": rank} if rank:
                pass
            case {"event": "cluster"}:
                self._progress.update(self._cluster, completed=WORKERS, description="Ray cluster of two nodes and a head")
                self._progress.stop_task(self._cluster)
            case {"event": "run", "run": run}:
                title = "training without a failure" if run == UNDISTURBED else "training again, with a failure"
                self._print(title, style="bold")
                self._bars[run] = self._progress.add_task(title, total=self._steps, note="starting workers")
            case {"event": "step", "run": run, "step": step, "loss": loss}:
                self._progress.update(self._bars[run], completed=step, note=f"loss {loss:.2f}")
            case {"event": "finished", "run": run}:
                self._progress.stop_task(self._bars[run])
            case {"event": "durable", "version": version, "step": step}:
                self._print(f"  version {version} (step {step}) is durable", style="dim")
            case {"event": "failed", "step": step, "reason": reason}:
                self._print(f"  the save of step {step} failed: {reason}", style="yellow")
            case {"event": "killed", "run": run, "step": step}:
                self._progress.update(self._bars[run], note="node lost")
                self._print(f"  killed a node during the save of step {step}", style="bold red")
            case {"event": "detected"}:
                self._print("  Ray Train detected the failure and restarts the workers", style="yellow")
            case {"event": "restored", "version": version, "step": step, "reached": reached}:
                self._print(f"  restored version {version}, step {step}; replayed the journal to step {reached}", style="green")


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
