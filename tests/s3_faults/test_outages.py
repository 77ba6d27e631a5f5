"""A store that stays unavailable: a save fails in time and names the object, and the next save works."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from helpers.local_cluster import LocalCluster
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy
from s3_faults.sample_state import HURRY, cases, check, two_group_state

import raystow
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.s3 import S3Store

pytestmark = pytest.mark.s3
FAULTS = [Fault.SLOW_DOWN, Fault.RESET_REQUEST, Fault.STALL_REQUEST, Fault.LOSE_ANSWER]
AWAY = 10_000  # requests: more than a test sends
WRITES = "PUT|POST"
PACK = r"versions/.*\.pack"
_steps = itertools.count(1)


def save_next_step(cluster: LocalCluster, *, timeout: float = 60) -> raystow.Version:
    step = next(_steps)
    version = cluster.save(two_group_state(step), step=step, timeout=timeout)
    check(version, step)
    return version


@pytest.mark.parametrize("fault", cases(FAULTS, Fault.SLOW_DOWN))
@pytest.mark.parametrize("path", [PACK, r"/tensors-.*\.parquet", r"/version\.json"])
def test_a_failed_save_names_the_object_and_the_reason(proxy: FaultProxy, cluster: LocalCluster, path: str, fault: Fault) -> None:
    proxy.inject(fault, WRITES, path, times=AWAY)
    begun = SYSTEM.monotonic()
    with pytest.raises(raystow.SaveFailed, match=path) as caught:
        save_next_step(cluster)
    assert SYSTEM.monotonic() - begun < 30  # the store's deadlines apply, not the save's
    text = str(caught.value)
    assert "rank" in text or "the commit failed" in text
    assert ("503" if fault is Fault.SLOW_DOWN else "failed") in text
    proxy.heal()
    save_next_step(cluster)


def test_hanging_uploads_end_with_the_attempt(proxy: FaultProxy, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end before their own deadline."""
    long_limits = replace(HURRY, request_seconds=20, retry_seconds=15)
    monkeypatch.setitem(S3Store.__init__.__kwdefaults__, "limits", long_limits)
    with LocalCluster(f"s3://{s3_bucket}/t-{SYSTEM.token()}/run") as cluster:
        stalled = proxy.inject(Fault.STALL_REQUEST, WRITES, PACK, times=1)
        begun = SYSTEM.monotonic()
        with pytest.raises(raystow.SaveFailed, match=rf"ranks \[0\] could not be stored: {PACK}: .* in time"):
            save_next_step(cluster, timeout=3)
        assert stalled.hits == 1
        assert SYSTEM.monotonic() - begun < 6
        save_next_step(cluster)  # the old upload still hangs


def test_the_error_names_a_store_that_accepts_no_writes(
    proxy: FaultProxy, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of coded bytes is full, so ranks cannot deliver their parts; the error must name the store as the cause."""
    with LocalCluster(f"s3://{s3_bucket}/t-{SYSTEM.token()}/run", memory=16 << 20) as cluster:
        proxy.inject(Fault.STALL_REQUEST, WRITES, PACK, times=AWAY)
        with pytest.raises(raystow.SaveFailed, match=rf"could not be stored: .*{PACK}"):
            save_next_step(cluster, timeout=3)
        proxy.heal()
        save_next_step(cluster)


@pytest.mark.parametrize("times", cases([1, 2, 3], 2))
def test_a_commit_whose_answers_are_lost_counts_once(proxy: FaultProxy, cluster: LocalCluster, times: int) -> None:
    before = [version.id for version in cluster.repository.versions()]
    lost = proxy.inject(Fault.LOSE_ANSWER, "PUT", r"/root\.json", times=times)
    versions = [save_next_step(cluster) for _ in range(times + 1)]
    assert lost.hits == times
    after = [version.id for version in cluster.repository.versions()]
    assert after == before + [version.id for version in versions]


def test_commits_with_lost_answers_count_once_among_pins(proxy: FaultProxy, cluster: LocalCluster) -> None:
    """Other threads write the root at the same time."""
    before = len(cluster.repository.versions())
    lost = proxy.inject(Fault.LOSE_ANSWER, "PUT", r"/root\.json", times=4, skip=1)
    first = save_next_step(cluster)
    with ThreadPoolExecutor(2) as others:
        pins = [others.submit(cluster.repository.pin, first, f"pin-{number}") for number in range(4)]
        versions = [save_next_step(cluster) for _ in range(3)]
        for pin in pins:
            pin.result()
    assert lost.hits == 4
    root = raystow.open(cluster.uri).root()
    assert len(root.versions) == before + 4
    assert {entry.id for entry in root.versions[-3:]} == {version.id for version in versions}
    assert {f"pin-{number}" for number in range(4)} <= set(root.pins)
