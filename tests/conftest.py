"""Fixtures for all tests, and the distribution of tests over processes (``pytest -n``).

One process runs all tests that start Ray, so that they share a cluster and no second one exists. These tests come first, because
they take longest; the other processes run the other files one by one, and so does the first process afterwards.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.azure_server import azure_server, make_container
from helpers.gcs_server import gcs_server
from helpers.s3_server import make_bucket, s3_server
from helpers.system_calls import SystemCalls
from hypothesis import HealthCheck, settings

from raystow.storage.runtime.clock import SYSTEM

_BUCKET = "raystow-tests"
_STARTS_RAY = re.compile(
    "tests/drills/|tests/monitoring/|tests/s3_faults/test_on_ray|tests/gpu/test_without_compiler"
    "|tests/integration/test_(?!cli(?!_keygen|_top)|dcp|delta_saves|gc|torchtitan|prune|reading_alone|journal_layouts|journal_trainers)"
)

# Tests set the width of the terminal. pytest, which imports readline, would pass its width to the processes that it starts.
os.environ.pop("COLUMNS", None)

# A shell that runs the tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's threads busy-wait: with more threads than free cores, small operations take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis has no deadline: on a busy machine, a slow test is not an error.
settings.register_profile("raystow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raystow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _STARTS_RAY.match(item.nodeid) is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "on Ray" if _STARTS_RAY.match(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def beside_no_other() -> None:
    """Assert that the test may use the shared cluster: only one process of the session may start Ray."""
    first = os.environ["PYTEST_CURRENT_TEST"]
    assert _STARTS_RAY.match(first), f"{first} starts Ray, maybe while other processes do: add its file in _STARTS_RAY"


@pytest.fixture
def system_calls() -> Iterator[SystemCalls]:
    """Yield what replaces system calls until the test ends."""
    calls = SystemCalls()
    yield calls
    calls.restore()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Yield the endpoint of an S3 server; the AWS_* variables refer to it until the session ends."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_bucket(s3_endpoint: str) -> str:
    """Return a bucket on that server."""
    return make_bucket(_BUCKET)


@pytest.fixture
def s3_uri(s3_bucket: str) -> str:
    """Return a fresh, empty ``s3://bucket/prefix`` for one test."""
    return f"s3://{s3_bucket}/t-{SYSTEM.token()}/run"


@pytest.fixture(scope="session")
def az_container() -> Iterator[str]:
    """Yield a container on an Azure Blob server; the AZURE_* variables refer to the server until the session ends."""
    with azure_server() as endpoint:
        yield make_container(endpoint, _BUCKET)


@pytest.fixture
def az_uri(az_container: str) -> str:
    """Return a fresh, empty ``az://container/prefix`` for one test."""
    return f"az://{az_container}/t-{SYSTEM.token()}/run"


@pytest.fixture(scope="session")
def gs_bucket() -> Iterator[str]:
    """Yield a bucket on a server of Google's API; STORAGE_EMULATOR_HOST refers to the server until the session ends."""
    with gcs_server(_BUCKET) as bucket:
        yield bucket


@pytest.fixture
def gs_uri(gs_bucket: str) -> str:
    """Return a fresh, empty ``gs://bucket/prefix`` for one test."""
    return f"gs://{gs_bucket}/t-{SYSTEM.token()}/run"
