"""A fault in each kind of request of a restore: the restore succeeds after a retry or raises an error, and never returns wrong
bytes."""

from __future__ import annotations

import pytest
from helpers.local_cluster import LocalCluster
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy
from s3_faults.sample_state import cases, check, two_group_state

import raystow
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.s3

OBJECTS = {
    "marker": r"/raystow\.json",
    "root": r"/root\.json",
    "record": r"/version\.json",
    "fragment": r"/tensors-.*\.parquet",
    "pack": r"/optimizer-.*\.pack",
}
FAULTS = [
    Fault.SLOW_DOWN,
    Fault.RESET_ANSWER,
    Fault.LOSE_ANSWER,
    Fault.STALL_REQUEST,
    Fault.STALL_ANSWER,
    Fault.DELAY,
    Fault.CORRUPT_ANSWER,
]


@pytest.fixture(scope="module")
def uri(cluster: LocalCluster) -> str:
    """Return a run with one version."""
    cluster.save(two_group_state(1), step=1)
    return cluster.uri


def restored(uri: str) -> raystow.Version:
    version = raystow.open(uri).latest()
    assert version is not None
    check(version, 1)
    return version


@pytest.mark.parametrize("fault", cases(FAULTS, Fault.RESET_ANSWER, Fault.CORRUPT_ANSWER))
@pytest.mark.parametrize("object", OBJECTS)
def test_a_restore_survives_a_single_fault(proxy: FaultProxy, uri: str, object: str, fault: Fault) -> None:
    rule = proxy.inject(fault, "GET", OBJECTS[object])
    restored(uri)
    assert rule.hits == 1


@pytest.mark.parametrize("fault", cases(FAULTS[:5], Fault.STALL_ANSWER))
@pytest.mark.parametrize("object", ["root", "pack"])
def test_a_store_that_is_down_is_an_error_with_the_object(proxy: FaultProxy, uri: str, object: str, fault: Fault) -> None:
    proxy.inject(fault, "GET", OBJECTS[object], times=1000)
    begun = SYSTEM.monotonic()
    with pytest.raises(raystow.RaystowError, match=OBJECTS[object].lstrip("/")) as caught:
        restored(uri)
    assert type(caught.value).__name__ == "StoreUnavailable"
    assert SYSTEM.monotonic() - begun < 20
    proxy.heal()
    restored(uri)


@pytest.mark.parametrize("object", OBJECTS)
def test_bytes_that_always_arrive_changed_raise_an_error(proxy: FaultProxy, uri: str, object: str) -> None:
    proxy.inject(Fault.CORRUPT_ANSWER, "GET", OBJECTS[object], times=1000)
    with pytest.raises(raystow.RaystowError, match=OBJECTS[object].lstrip("/")) as caught:
        restored(uri)
    assert type(caught.value).__name__ in ("Damaged", "StoreUnavailable")
