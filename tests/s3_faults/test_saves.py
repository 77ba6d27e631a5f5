"""A fault in each kind of request of a save: the save succeeds after a retry, and exactly one version with its bytes exists."""

from __future__ import annotations

import itertools

import pytest
from helpers.local_cluster import LocalCluster
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy
from s3_faults.sample_state import cases, check, two_group_state

import raystow
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.s3

REQUESTS = {
    "pack": ("PUT", r"\.pack$"),
    "begin of a large pack": ("POST", r"\.pack\?uploads"),
    "part of a large pack": ("PUT", r"\.pack\?.*partNumber=2"),
    "end of a large pack": ("POST", r"\.pack\?uploadId"),
    "fragment": ("PUT", r"/tensors-.*\.parquet"),
    "record": ("PUT", r"/version\.json"),
    "root": ("PUT", r"/root\.json"),
}
FAULTS = [Fault.SLOW_DOWN, Fault.RESET_REQUEST, Fault.LOSE_ANSWER, Fault.STALL_REQUEST, Fault.CORRUPT_REQUEST, Fault.DELAY]
_WITH_BODY = (Fault.RESET_REQUEST, Fault.CORRUPT_REQUEST)
_steps = itertools.count(1)


@pytest.mark.parametrize("fault", cases(FAULTS, Fault.LOSE_ANSWER, Fault.STALL_REQUEST))
@pytest.mark.parametrize("kind", cases(list(REQUESTS), "pack", "part of a large pack", "end of a large pack", "record"))
def test_a_save_survives_a_single_fault(proxy: FaultProxy, cluster: LocalCluster, kind: str, fault: Fault) -> None:
    if fault in _WITH_BODY and kind == "begin of a large pack":
        pytest.skip("this request has no body")
    step = next(_steps)
    before = cluster.repository.versions()
    rule = proxy.inject(fault, *REQUESTS[kind])
    begun = SYSTEM.monotonic()
    saved = cluster.save(two_group_state(step), step=step, timeout=30)
    assert SYSTEM.monotonic() - begun < 30
    assert rule.hits == 1
    version = raystow.open(cluster.uri).latest()
    assert version is not None
    assert version.id == saved.id
    assert len(raystow.open(cluster.uri).versions()) == len(before) + 1
    check(version, step)
    left = list(cluster.repository.store.unfinished())
    if kind == "begin of a large pack" and fault in (Fault.LOSE_ANSWER, Fault.DELAY):
        cluster.repository.store.abort(left)  # no client knows the id of that upload, so only a collection removes it
        left = list(cluster.repository.store.unfinished())
    assert left == []
