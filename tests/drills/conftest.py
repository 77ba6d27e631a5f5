"""A cluster and a training for each drill, and a table of the outcomes of all drills (``--drill-table=FILE``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import ray
from s3_faults.proxy import FaultProxy

from drills.drill_cluster import DrillCluster
from drills.drill_report import Drill, write_table
from drills.training import Training

HERE = Path(__file__).parent
DRILLS = pytest.StashKey[list[Drill]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drill-table", metavar="FILE", type=Path, help="write the outcomes of the drills into a file, as Markdown")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, drills = session.config.getoption("--drill-table", None), session.config.stash.get(DRILLS, [])
    if path is not None and drills:
        write_table(path, drills)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.drill)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the drills of a test to the table only if the test passed."""
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash.setdefault(DRILLS, []).extend(item.stash.get(DRILLS, []))
    return report


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[Drill], None]:
    """Return a function that adds the outcome of a drill to the table and prints it."""

    def keep(drill: Drill) -> None:
        request.node.stash.setdefault(DRILLS, []).append(drill)
        print(drill.line(), end="")

    return keep


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[DrillCluster]:
    """Start a head without other nodes."""
    if ray.is_initialized():
        ray.shutdown()
    # Ranks import the modules of this folder and of the folder above.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster = DrillCluster()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def training(cluster: DrillCluster, tmp_path: Path) -> Training:
    """Return a training with an empty repository and without ranks."""
    return Training(cluster, tmp_path)


@pytest.fixture
def line(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Start a proxy to an S3 server that injects faults. Request it before ``cluster``, so that all processes use the proxy."""
    server = urlsplit(s3_endpoint)
    with FaultProxy(server.hostname or "", server.port or 80) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running
