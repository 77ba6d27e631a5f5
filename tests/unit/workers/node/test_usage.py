"""When a node worker that nobody uses ends, and what keeps it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster
from helpers.polling import wait_until

from raystow.orchestrator.client.presence import AFTER_DEATH, Presence
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import ClusterError, OutcomeUnknown
from raystow.storage.format import keys
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.node.node import Node
from raystow.workers.protocol.messages import AttemptKey, EntryInfo, Generation, Replica
from raystow.workers.protocol.unix_channel import Connection
from raystow.workers.replication.peers import Peers
from raystow.workers.usage import AFTERWARDS, Usage

URI = "memory://run"
FOREVER = 1e6


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(clock: FakeClock) -> Iterator[Node]:
    def connect(uri: str) -> Any:
        raise AssertionError("no rank saves")

    with closing(Node("n", connect, threads=1, usage=Usage(clock))) as node:
        yield node


def left(node: Node) -> None:
    """Wait until the node worker has seen the end of its last connection."""
    wait_until(lambda: not node.usage.visits, "the end of a connection")


def test_a_worker_that_nobody_comes_to_ends(node: Node, clock: FakeClock) -> None:
    assert not node.end_if_unused()
    clock.time += AFTERWARDS
    assert node.end_if_unused()
    assert not node.expect()
    assert node.end_if_unused()  # called again where Ray's head node did not answer
    with pytest.raises(ClusterError):
        Connection.connect(node.address)


def test_a_process_that_asks_for_the_worker_finds_it(node: Node, clock: FakeClock) -> None:
    """It connects some time after the answer."""
    clock.time += AFTERWARDS
    assert node.expect()
    clock.time += AFTERWARDS - 1
    assert not node.end_if_unused()


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("seconds", [AFTERWARDS, 2 * AFTER_DEATH])
def test_a_worker_stays_for_its_processes(node: Node, clock: FakeClock, failed: bool, seconds: float) -> None:
    """Also while they neither save nor restore; then for as long as they ask, and longer if they have failed."""
    first, second = (Presence(URI, seconds, lambda: None) for _ in range(2))
    first.announce(node.address)
    second.announce(node.address)
    clock.time += FOREVER
    first.close(failed=failed)
    assert not node.end_if_unused()
    second.close(failed=False)
    left(node)
    clock.time += (max(seconds, AFTER_DEATH) if failed else seconds) - 1
    assert not node.end_if_unused()
    clock.time += 1
    assert node.end_if_unused()


def test_a_training_that_begins_again_ends_the_wait_for_it(node: Node, clock: FakeClock) -> None:
    for failed in (True, False):
        process = Presence(URI, AFTERWARDS, lambda: None)
        process.announce(node.address)
        process.close(failed=failed)
        left(node)
    clock.time += AFTERWARDS
    assert node.end_if_unused()


def test_a_process_returns_to_a_worker_that_was_killed(tmp_path: Path) -> None:
    """Without a save or restore in between: else the one that Ray starts again would end."""
    restarted, returned = threading.Event(), queue.SimpleQueue[str]()
    with LocalCluster(tmp_path.as_uri(), threads=1, process="node") as cluster:

        def renew() -> None:
            assert restarted.wait(60)
            presence.announce(cluster.address(0))
            returned.put(cluster.address(0))

        presence = Presence(URI, AFTERWARDS, renew)
        presence.announce(cluster.address(0))
        cluster.kill_node(0)
        restarted.set()
        assert returned.get(timeout=60) == cluster.address(0)
        presence.close(failed=False)


def test_a_worker_stays_for_a_copy_of_a_save_that_is_no_version(node: Node, clock: FakeClock) -> None:
    attempt = AttemptKey("0" * 32, 1, "a" * 16)
    node.replicas.accept(Replica(attempt, 1, keys.fragment(1, attempt.token, 1), 8, ("other", "n")), b"fragment")
    clock.time += FOREVER
    assert not node.end_if_unused()
    node.replicas.committed(attempt)
    clock.time += FOREVER
    assert node.end_if_unused()


def test_a_copy_of_a_save_goes_with_the_next_version(node: Node, clock: FakeClock, tmp_path: Path) -> None:
    """No node tells this one, since the one that has sent the copy is gone: the store says it."""
    with LocalCluster(tmp_path.as_uri(), threads=1) as cluster:
        attempt = AttemptKey(cluster.repository.id, 1, "a" * 16)
        copy = Replica(attempt, 1, keys.fragment(1, attempt.token, 1), 8, ("other", "n"), uri=cluster.uri)
        node.replicas.accept(copy, b"fragment")
        clock.time += FOREVER
        assert not node.end_if_unused()
        cluster.save({"w": torch.arange(1000.0)}, step=1)
        clock.time += FOREVER
        assert node.end_if_unused()


def test_a_worker_stays_while_other_nodes_read(node: Node, clock: FakeClock) -> None:
    """But not for copies that others send: two nodes would keep each other from ending."""
    peers = Peers(lambda _: node.contact, clock)
    attempt, name = AttemptKey("0" * 32, 1, "a" * 16), keys.fragment(1, "a" * 16, 1)
    with closing(peers):
        clock.time += AFTERWARDS - 1
        peers.accept("n", Replica(attempt, 1, name, 8, ("other", "n")), b"fragment")
        node.replicas.committed(attempt)
        assert peers.read("n", attempt.repository, name, 0, memoryview(bytearray(8)))
        left(node)
        clock.time += AFTERWARDS - 1
        assert not node.end_if_unused()
        peers.accept("n", Replica(attempt, 1, name, 8, ("other", "n")), b"fragment")
        clock.time += 1
        assert node.end_if_unused()


def test_a_worker_stays_for_recorded_steps(node: Node, clock: FakeClock) -> None:
    entry = EntryInfo("0" * 32, 0, 1, 5, 4, (Generation("0" * 16, 1),), 4)
    assert node.journal.store.add(entry, b"step", own=True) == ""
    clock.time += FOREVER
    assert not node.end_if_unused()
    node.journal.committed(entry.repository, 5)
    clock.time += FOREVER
    assert node.end_if_unused()


def test_a_worker_stays_for_a_save_until_a_newer_version_exists(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes may have made it, so the store is asked."""

    def lost(*_: object) -> Any:
        raise OutcomeUnknown("no answer", subject="version 2")

    state = {"w": torch.arange(1000.0)}
    cluster, clock.time = LocalCluster(tmp_path.as_uri(), threads=1), SYSTEM.monotonic()
    node = cluster._nodes[0]
    assert isinstance(node, Node)
    node.usage.clock = clock
    with cluster:
        cluster.save(state, step=1)
        with monkeypatch.context() as patch:
            patch.setattr(Committer, "commit", lost)
            with pytest.raises(OutcomeUnknown):
                cluster.save(state, step=2)
        clock.time += FOREVER
        assert not node.end_if_unused()  # the rank is connected
        cluster._stagings.pop(0)[1].close()
        left(node)
        clock.time += FOREVER
        assert not node.end_if_unused()
        with LocalCluster(tmp_path.as_uri(), threads=1) as other:
            other.save(state, step=3)
        assert not node.end_if_unused()  # it does not ask all the time
        clock.time += AFTERWARDS
        assert node.end_if_unused()
