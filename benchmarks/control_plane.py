"""What the control plane costs: commits, the coordinator of many nodes, and opening a repository of many versions.

- *Commit*: ``Committer.commit`` as the coordinator calls it, on a local folder and on an S3 server, with 1, 100 and 1,000 live
  versions: the version record is written, the root read, changed and swapped. Between two commits the oldest version is taken out
  of the root again, outside the clock, so that their number stays.
- *Coordinator*: saves by 16, 256 and 2,048 nodes of 8 ranks with 1,000 tensors each; see ``control_plane_save``.
- *Opening*: the newest version of a repository with 10,000, found in a process that has never seen it; every call to the store is
  counted.

The S3 server is the one that RAYSTOW_TEST_S3 or AWS_ENDPOINT_URL names, with credentials in the environment; without one it is
moto, a single Python process, whose time is not that of a real server.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from control_plane_save import RANKS, TENSORS, simulate
from rich.console import Console
from rich.table import Table

import raystow
from raystow.storage import repository as opening
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from raystow.storage.repository import Repository, create_repository
from raystow.storage.stores import open_store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from s3_server import make_bucket, s3_server

LIVE = (1, 100, 1000)
NODES = (16, 256, 2048)
MANY = 10_000
CPU, MEMORY, OPENING = 5.0, 2 << 30, 0.2
LINEAR = 1.2
"""What one more node may cost more among many than among few and still be called linear: clocks and caches are not exact."""


def entries(number: int) -> tuple[Entry, ...]:
    """Live versions as a long run has them; their objects do not exist, and nobody reads them here."""
    return tuple(
        Entry(i, SYSTEM.token(), "5e" * 32, 700, 500 * i, 1.79e9 + 600 * i, 10**12, 8 * 10**11) for i in range(1, number + 1)
    )


def populate(uri: str, live: int) -> Repository:
    """A new repository with so many live versions."""
    repository = create_repository(uri)
    made = entries(live)
    repository.register.update(lambda root: replace(root, versions=made, next_id=live + 1))
    return repository


def record(committer: Committer) -> VersionRecord:
    """That of a save by one node."""
    id, attempt = committer.reserve()
    fragment = FragmentInfo(0, 364_000, "5e" * 32, tuple(range(RANKS)), RANKS * TENSORS, RANKS * TENSORS << 20, 6 << 30)
    packs = tuple(PackInfo(0, "weights", number, 64 << 20) for number in range(97))
    of = committer.repository.id, id, attempt, committer.epoch
    return VersionRecord(*of, 100, SYSTEM.now(), RANKS, fragments=(fragment,), packs=packs)


def commits(uri: str, live: int, rounds: int) -> dict[str, Any]:
    """Latency of a commit, milliseconds; and of a put of the bytes of such a root without any condition, to compare."""
    repository = populate(uri, live)
    committer = Committer(repository, f"benchmark-{SYSTEM.token()}")
    taken, plain = [], []
    for turn in range(-3, rounds):
        wanted = record(committer)
        start = time.perf_counter()
        committer.commit(wanted)
        end = time.perf_counter()
        root = repository.register.update(lambda root: replace(root, versions=root.versions[1:]))
        assert len(root.versions) == live
        data = root.dump()
        before = time.perf_counter()
        repository.store.put("probe/plain", [data])
        if turn >= 0:
            taken.append(end - start)
            plain.append(time.perf_counter() - before)
    return {"live": live, "root": len(data), "commit ms": spread(taken), "plain put ms": spread(plain)}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


class Counted:
    """A store that counts the calls made to it."""

    def __init__(self, uri: str, calls: Counter[str]) -> None:
        self._store, self._calls = open_store(uri), calls

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "get_tagged", "get_range", "list", "put", "put_if"):
            self._calls[name] += 1
        return getattr(self._store, name)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Within, repositories are opened on stores that count."""
    calls: Counter[str] = Counter()
    with mock.patch.object(opening, "open_store", lambda uri: Counted(uri, calls)):
        yield calls


def open_many(uri: str, rounds: int) -> dict[str, Any]:
    """Milliseconds and store calls until the newest of ``MANY`` versions is found."""
    populate(uri, MANY)
    ways: dict[str, Callable[[], raystow.Version | None]] = {
        "raystow.latest(uri)": lambda: raystow.latest(uri),
        "raystow.open(uri).latest()": lambda: raystow.open(uri).latest(),
    }
    results = {}
    for name, find in ways.items():
        with counting() as calls:
            newest = find()
        assert newest is not None
        assert newest.id == MANY
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            find()
            taken.append(time.perf_counter() - start)
        results[name] = {"calls": dict(calls), "ms": spread(taken)}
    return results


@contextlib.contextmanager
def s3() -> Iterator[tuple[str, str]]:
    """An address on the S3 server, and its name."""
    given = os.environ.get("RAYSTOW_TEST_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if given is not None:
        os.environ["RAYSTOW_TEST_S3"] = given
    with s3_server() as endpoint:
        uri = f"s3://{make_bucket('raystow-tests')}/control-plane-{SYSTEM.token()}"
        try:
            yield uri, endpoint if given is not None else f"moto {version('moto')}"
        finally:
            store = open_store(uri)
            store.delete([info.key for info in store.list("")])


def claims(results: dict[str, Any]) -> dict[str, bool]:
    """What raystow promises, and whether this run bears it out."""
    few, some, many = results["coordinator"]
    found = results["opening"]["local"]["raystow.latest(uri)"]
    return {
        f"the coordinator's CPU time at {many['nodes']} nodes is below {CPU:.0f} s": many["cpu"] < CPU,
        f"its memory there is below {MEMORY >> 30} GiB": many["peak"] < MEMORY,
        "its CPU time grows at most linearly": slope(some, many, "cpu") <= LINEAR * slope(few, some, "cpu"),
        "its memory grows at most linearly": slope(some, many, "peak") <= LINEAR * slope(few, some, "peak"),
        f"the newest of {MANY:,} versions is found in one GET": found["calls"] == {"get": 1},
        **{
            f"and in {1e3 * OPENING:.0f} ms on {store} (p50)": ways["raystow.latest(uri)"]["ms"]["p50"] < 1e3 * OPENING
            for store, ways in results["opening"].items()
        },
    }


def slope(few: dict[str, Any], many: dict[str, Any], what: str) -> float:
    """What one more node costs."""
    return float((many[what] - few[what]) / (many["nodes"] - few["nodes"]))


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """One for each part."""
    grid = table("commit, ms", "store", ">live versions", ">root, kB", ">p50", ">p99", ">plain put p50", ">p99")
    for store, rows in results["commit"].items():
        for row in rows:
            figures = [f"{row[of][at]:.1f}" for of in ("commit ms", "plain put ms") for at in ("p50", "p99")]
            grid.add_row(store, f"{row['live']:,}", f"{row['root'] / 1e3:,.0f}", *figures)
    yield grid
    headings = (">nodes", ">ranks", ">packs", ">record, MB", ">CPU, s", ">wall, s", ">peak, MiB", ">of it empty")
    grid = table(f"the coordinator, for one save of {TENSORS:,} tensors", *headings)
    for row in results["coordinator"]:
        counts = [f"{row[name]:,}" for name in ("nodes", "ranks", "packs")]
        sizes = [f"{row[name] / (1 << 20):.0f}" for name in ("peak", "empty")]
        grid.add_row(*counts, f"{row['record'] / 1e6:.1f}", f"{row['cpu']:.2f}", f"{row['wall']:.2f}", *sizes)
    yield grid
    grid = table(f"the newest of {MANY:,} versions", "store", "call", "store calls", ">p50, ms", ">p99")
    for store, ways in results["opening"].items():
        for name, row in ways.items():
            calls = ", ".join(f"{number} {call}" for call, number in row["calls"].items())
            grid.add_row(store, name, calls, f"{row['ms']['p50']:.0f}", f"{row['ms']['p99']:.0f}")
    yield grid


def table(title: str, *headings: str) -> Table:
    """With columns that are aligned to the right where the heading begins with ``>``."""
    grid = Table(title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left")
    return grid


def machine() -> dict[str, Any]:
    """Where the run took place."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
        return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load before": os.getloadavg()[0], "os": platform.platform()}
    return {"cpu": platform.processor(), "cores": os.cpu_count(), "load before": os.getloadavg()[0], "os": platform.platform()}


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    folder: Annotated[Path | None, typer.Option(help="where the local store's files go for the time of the run")] = None,
    rounds: Annotated[int, typer.Option(min=10, help="commits that count, on each store and with each number of versions")] = 200,
    saves: Annotated[int, typer.Option(min=1, help="saves by each number of nodes; the dearest counts")] = 3,
) -> None:
    """Measure commits, the coordinator of many nodes, and opening."""
    os.environ.pop("RAYSTOW_TRUSTED_KEYS", None)
    os.environ.pop("RAYSTOW_SIGNING_KEY", None)
    console = Console()
    about: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("raystow", "ray", "boto3", "pyarrow")},
        "rounds": rounds,
        "saves": saves,
        "node": {"ranks": RANKS, "tensors of each rank": TENSORS},
    }
    results: dict[str, Any] = {"commit": {}, "coordinator": [], "opening": {}}
    with tempfile.TemporaryDirectory(dir=folder) as place, s3() as (uri, server):
        about["S3 server"] = server
        for store, base in (("local", place), ("s3", uri)):
            results["commit"][store] = [commits(f"{base}/live-{live}", live, rounds) for live in LIVE]
            results["opening"][store] = open_many(f"{base}/many", rounds // 10)
        for nodes in NODES:
            results["coordinator"].append(simulate(f"{place}/nodes-{nodes}", nodes, saves))
    held = claims(results)
    console.print(f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {about['date']}; S3: {about['S3 server']}")
    for grid in tables(results):
        console.print(grid)
    for claim, holds in held.items():
        console.print(f"{'pass' if holds else 'MISS'}: {claim}", style="green" if holds else "bold red")
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"control_plane-{about['date'][:10]}.json"
    file.write_text(json.dumps({**about, "results": results, "claims": held}, indent=1) + "\n")
    console.print(f"written to {file}")


if __name__ == "__main__":
    typer.run(main)
