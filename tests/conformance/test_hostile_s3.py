"""What a hostile S3 server answers ends in an error of ours that names the object, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_s3 import BEHAVIORS, ONLY, HostileServer

from raystow.storage.errors import Damaged, StoreError
from raystow.storage.stores.s3 import S3Store
from raystow.storage.stores.s3_clients import S3Limits

LIMITS = S3Limits(connect_seconds=2, stall_seconds=0.3, request_seconds=0.4, attempts=2, retry_seconds=0.5)
MEMORY = 64 << 20
UNBOUNDED = ("endless_error", "get_range")
"""obstore reads errors to their end: until ``request_seconds`` are over."""

OPERATIONS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("root.json", max_bytes=1 << 20),
    "get_range": lambda store: store.get_range("root.json", 0, 100),
    "list": lambda store: [*store.list("")],
    "put_if": lambda store: store.put_if("root.json", b"{}", None),
    "delete": lambda store: store.delete(["root.json"]),
    "unfinished": lambda store: [*store.unfinished()],
}
CASES = [
    pytest.param(name, operation, marks=[pytest.mark.slow] if operation not in ("get", "get_range", only) else [])
    for name in BEHAVIORS
    for only in [ONLY.get(name)]
    for operation in ([only] if only else OPERATIONS)
]


@pytest.fixture(scope="module")
def server() -> HostileServer:
    return HostileServer()


@pytest.fixture(scope="module")
def store(server: HostileServer) -> Iterator[S3Store]:
    with pytest.MonkeyPatch.context() as patch, server.running() as endpoint:
        for name in ("PROFILE", "ENDPOINT_URL_S3", "SESSION_TOKEN", "REGION"):
            patch.delenv(f"AWS_{name}", raising=False)
        given = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1", "ENDPOINT_URL": endpoint}
        for name, value in given.items():
            patch.setenv(f"AWS_{name}", value)
        yield S3Store("bucket", "run", limits=LIMITS)


def peak() -> int:
    """The most memory that this process has had since it was reset, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_each_answer_ends_in_an_error_of_ours(server: HostileServer, store: S3Store, name: str, operation: str) -> None:
    server.behavior = BEHAVIORS[name]()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(OPERATIONS[operation], store).exception(60)
    assert isinstance(error, StoreError | Damaged), repr(error)
    assert "s3://bucket/run" in error.subject
    assert (name, operation) == UNBOUNDED or peak() - before < MEMORY
