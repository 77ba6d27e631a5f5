"""Every invalid answer of a server raises a raystow error that names the object, in bounded time and, with S3, bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.store_variables import refer_to

from conformance.hostile_s3 import BEHAVIORS, ONLY, HostileServer
from raystow.storage.errors import Damaged, StoreError
from raystow.storage.object_store import ObjectStore
from raystow.storage.stores.azure import AzureStore
from raystow.storage.stores.gcs import GcsStore
from raystow.storage.stores.request_limits import DEFAULT_LIMITS, RequestLimits
from raystow.storage.stores.s3 import S3Store

HURRY = RequestLimits(connect_seconds=2, stall_seconds=0.3, request_seconds=0.4, attempts=2, retry_seconds=0.5)
LIMITS = replace(HURRY, suspect_seconds=0.05, suspect_bytes=16 << 20)
MEMORY = 64 << 20
ENDLESS = ("endless_error", "endless_body", "endless_chunked_body", "body_larger_than_any")


def unbounded(scheme: str, name: str, operation: str) -> bool:
    """Return whether memory is not bounded: obstore reads errors and listings to their end, until ``request_seconds``."""
    if scheme == "s3":
        return False
    return name == "endless_error" or (name in ENDLESS and operation not in ("get", "get_range"))


OPERATIONS: dict[str, Callable[[ObjectStore], object]] = {
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
FAST = [
    ("same_page_for_ever", "list"),
    ("drips_its_body", "get"),
    ("drips_its_body", "get_range"),
    ("body_larger_than_any", "get"),
    ("no_tag", "get"),
]
WRITTEN = ("drips_its_body", "stalls_in_its_body", "cuts_its_body", *ENDLESS[1:])
"""Behaviors that begin with a valid status and tag: obstore completes a write there and does not read the body."""

FATAL = ("body_larger_than_any", "list")
"""obstore allocates the memory that a listing declares; the failed allocation ends the process."""

CLOUD_CASES = [
    pytest.param(scheme, name, operation, marks=[] if (name, operation) in FAST else [pytest.mark.slow])
    for scheme in ("az", "gs")
    for name in BEHAVIORS
    for only in [ONLY.get(name)]
    if only != "list" or scheme == "gs"  # those listings have the form of S3
    for operation in ([only] if only else OPERATIONS)
    if operation != "unfinished"  # sends nothing
    if (name, operation) != FATAL and not (operation == "put_if" and name in WRITTEN)
    if not ((scheme, operation) == ("gs", "delete") and name in (*WRITTEN, "no_tag"))  # one request per object on Google
]


@pytest.fixture(scope="module")
def server() -> HostileServer:
    return HostileServer()


@pytest.fixture(scope="module")
def stores(server: HostileServer) -> Iterator[dict[str, ObjectStore]]:
    with pytest.MonkeyPatch.context() as patch, server.running() as endpoint:
        refer_to(endpoint, patch)
        yield {kind.scheme: kind("bucket", "run", limits=LIMITS) for kind in (S3Store, AzureStore, GcsStore)}


def peak() -> int:
    """Return the peak memory of this process since the last reset, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def check(server: HostileServer, store: ObjectStore, name: str, operation: str) -> None:
    """Check that the answer raises an error that names the object, within the memory limit."""
    server.behavior = BEHAVIORS[name]()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(OPERATIONS[operation], store).exception(60)
    assert isinstance(error, StoreError | Damaged), repr(error)
    assert store.uri in error.subject
    assert unbounded(store.uri[:2], name, operation) or peak() - before < MEMORY


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_each_invalid_answer_of_s3_raises_a_raystow_error(
    server: HostileServer, stores: dict[str, ObjectStore], name: str, operation: str
) -> None:
    check(server, stores["s3"], name, operation)


def test_an_endless_error_is_bounded_before_the_deadline(server: HostileServer, stores: dict[str, ObjectStore]) -> None:
    """The default deadline alone would accept 90 s of the answer."""
    limits = replace(DEFAULT_LIMITS, suspect_seconds=0.05, suspect_bytes=16 << 20)
    check(server, S3Store("bucket", "run", limits=limits), "endless_error", "get_range")


@pytest.mark.parametrize(("scheme", "name", "operation"), CLOUD_CASES)
def test_each_invalid_answer_of_clouds_raises_a_raystow_error(
    server: HostileServer, stores: dict[str, ObjectStore], scheme: str, name: str, operation: str
) -> None:
    check(server, stores[scheme], name, operation)
