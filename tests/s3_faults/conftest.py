"""An S3 server behind a proxy that injects faults; raystow in this process uses the proxy, with short deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from helpers.local_cluster import LocalCluster
from s3_faults.proxy import FaultProxy
from s3_faults.sample_state import HURRY

from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.s3 import S3Store


@pytest.fixture(scope="module")
def line(s3_endpoint: str) -> Iterator[FaultProxy]:
    """Start a proxy that all clients in the tests of one file use."""
    server = urlsplit(s3_endpoint)
    with FaultProxy(server.hostname or "", server.port or 80) as running, pytest.MonkeyPatch.context() as patch:
        patch.setitem(S3Store.__init__.__kwdefaults__, "limits", HURRY)
        patch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def proxy(line: FaultProxy) -> Iterator[FaultProxy]:
    """Yield the proxy without faults at the start and at the end of a test."""
    yield line
    line.heal()


@pytest.fixture(scope="module")
def cluster(line: FaultProxy, s3_bucket: str) -> Iterator[LocalCluster]:
    """Start one run to which all tests of a file save, one after another."""
    with LocalCluster(f"s3://{s3_bucket}/t-{SYSTEM.token()}/run") as running:
        yield running
