"""Measure commits, and opening a repository with many versions. For the coordinator, see ``scale``.

- *Commit*: ``Committer.commit``, on a local folder and on an S3 server, with 1, 100 and 1,000 live versions: write the version
  record, then read, change and swap the root. Between commits, outside the clock, the oldest version is removed from the root.
- *Opening*: find the newest of 10,000 versions in a new process; store calls are counted.

The S3 server is the one in RAYSTOW_TEST_S3 or AWS_ENDPOINT_URL, with credentials in the environment; otherwise moto, a single
Python process that is slower than a real server.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import report
import typer
from control_plane_save import RANKS, TENSORS
from report import table_of
from rich.console import Console
from rich.table import Table

import raystow
from raystow.storage import repository as opening
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.root import Entry, Root
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.repository import Repository, create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.s3_server import make_bucket, s3_server

LIVE = (1, 100, 1000)
MANY = 10_000
OPENING = 0.2


def entries(number: int) -> tuple[Entry, ...]:
    """Return entries of live versions, whose objects do not exist and are not read."""
    return tuple(
        Entry(i, SYSTEM.token(), "5e" * 32, 700, 500 * i, 1.79e9 + 600 * i, 10**12, 8 * 10**11) for i in range(1, number + 1)
    )


def populate(uri: str, live: int) -> Repository:
    """Create a repository with this number of live versions."""
    repository = create_repository(uri)
    put_root(repository, replace(repository.root(), versions=entries(live), next_id=live + 1))
    return repository


def put_root(repository: Repository, root: Root) -> bytes:
    """Replace the root by one that no commit could lead to, and return its bytes."""
    data = root.dump()
    repository.store.put(keys.ROOT, [data])
    return data


def record(committer: Committer, nodes: int = 1) -> VersionRecord:
    """Return the record of a save by so many nodes."""
    id, attempt = committer.reserve()
    rows = RANKS * TENSORS
    fragments = tuple(
        FragmentInfo(
            node, 364_000, "5e" * 32, tuple(range(node * RANKS, (node + 1) * RANKS)), rows, rows << 20, 6 << 30, packs=97
        )
        for node in range(nodes)
    )
    of = committer.catalog.id, id, attempt, committer.epoch
    return VersionRecord(*of, 100, SYSTEM.now(), nodes * RANKS, fragments=fragments, packs=None)


def commits(uri: str, live: int, rounds: int, *, nodes: int = 1) -> dict[str, Any]:
    """Measure commits in milliseconds and, for comparison, unconditional puts of a root. ``nodes``: of each version."""
    repository = populate(uri, live)
    committer = Committer(repository, f"benchmark-{SYSTEM.token()}")
    taken, plain, cpu = [], [], []
    for turn in range(-3, rounds):
        made = record(committer, nodes)
        start, used = time.perf_counter(), time.process_time()
        committer.commit(made)
        end, used = time.perf_counter(), time.process_time() - used
        root = repository.root()
        assert len(root.versions) == live + 1
        data = put_root(repository, replace(root, versions=root.versions[1:]))
        before = time.perf_counter()
        repository.store.put("probe/plain", [data])
        if turn >= 0:
            taken.append(end - start)
            cpu.append(used)
            plain.append(time.perf_counter() - before)
    spreads = {"commit ms": spread(taken), "commit CPU ms": spread(cpu), "plain put ms": spread(plain)}
    return {"live": live, "root": len(data), **spreads}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


class Counted:
    """A store that counts its calls."""

    def __init__(self, uri: str, calls: Counter[str]) -> None:
        self._store, self._calls = open_store(uri), calls

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "get_tagged", "get_range", "list", "put", "put_if"):
            self._calls[name] += 1
        return getattr(self._store, name)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Open repositories on counting stores within this context."""
    calls: Counter[str] = Counter()
    with mock.patch.object(opening, "open_store", lambda uri: Counted(uri, calls)):
        yield calls


def open_many(uri: str, rounds: int) -> dict[str, Any]:
    """Measure milliseconds and store calls to find the newest of ``MANY`` versions."""
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
    """Yield an address on the S3 server, and the server's name."""
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
    """Return raystow's goals and whether this run meets them."""
    found = results["opening"]["local"]["raystow.latest(uri)"]
    return {
        f"the newest of {MANY:,} versions is found in one GET": found["calls"] == {"get": 1},
        **{
            f"and in {1e3 * OPENING:.0f} ms on {store} (p50)": ways["raystow.latest(uri)"]["ms"]["p50"] < 1e3 * OPENING
            for store, ways in results["opening"].items()
        },
    }


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each part."""
    grid = table_of("commit, ms", "live versions", "root, kB", "p50", "p99", "plain put p50", "p99")
    for store, rows in results["commit"].items():
        for row in rows:
            figures = [f"{row[of][at]:.1f}" for of in ("commit ms", "plain put ms") for at in ("p50", "p99")]
            grid.add_row(store, f"{row['live']:,}", f"{row['root'] / 1e3:,.0f}", *figures)
    yield grid
    grid = table_of(f"the newest of {MANY:,} versions", "<call", "<store calls", "p50, ms", "p99")
    for store, ways in results["opening"].items():
        for name, row in ways.items():
            calls = ", ".join(f"{number} {call}" for call, number in row["calls"].items())
            grid.add_row(store, name, calls, f"{row['ms']['p50']:.0f}", f"{row['ms']['p99']:.0f}")
    yield grid


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    folder: Annotated[Path | None, typer.Option(help="parent folder of the local store, which is deleted at the end")] = None,
    rounds: Annotated[int, typer.Option(min=10, help="measured commits per store and number of versions")] = 200,
) -> None:
    """Measure commits and opening."""
    os.environ.pop("RAYSTOW_TRUSTED_KEYS", None)
    os.environ.pop("RAYSTOW_SIGNING_KEY", None)
    console = Console()
    about: dict[str, Any] = {
        **report.about("raystow", "ray", "boto3", "pyarrow"),
        "rounds": rounds,
    }
    results: dict[str, Any] = {"commit": {}, "opening": {}}
    with tempfile.TemporaryDirectory(dir=folder) as place, s3() as (uri, server):
        about["S3 server"] = server
        for store, base in (("local", place), ("s3", uri)):
            results["commit"][store] = [commits(f"{base}/live-{live}", live, rounds) for live in LIVE]
            results["opening"][store] = open_many(f"{base}/many", rounds // 10)
    held = claims(results)
    console.print(f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {about['date']}; S3: {about['S3 server']}")
    report.show(console, tables(results), held)
    report.write(console, out, "control_plane", {**about, "results": results, "claims": held})


if __name__ == "__main__":
    typer.run(main)
