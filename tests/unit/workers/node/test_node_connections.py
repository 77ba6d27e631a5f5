"""A node worker connects to coordinators and stores of several repositories."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from helpers.fake_ray import FakeRay
from helpers.no_ray import connect_without_ray

from raystow.storage.errors import ClusterError
from raystow.storage.stores.settings import JobSettings, StoreAddress
from raystow.workers.node.actor import NODE, RayPeers
from raystow.workers.node.node import Node
from raystow.workers.protocol.messages import RankDisconnected


class NoCoordinator:
    def ask(self, request: RankDisconnected) -> None: ...


def test_a_connection_that_hangs_blocks_nothing_else() -> None:
    """While Ray's head node is frozen, a connection takes a minute: the status and other repositories do not wait for it."""
    connecting, end = queue.SimpleQueue[str](), threading.Event()

    def connect(uri: str, _: JobSettings) -> Any:
        if uri == "memory://hanging":
            connecting.put(uri)
            end.wait()
        return NoCoordinator()

    with contextlib.closing(Node("n", connect, threads=1)) as node, ThreadPoolExecutor() as pool:
        try:
            pool.submit(node.rank_disconnected, StoreAddress("memory://hanging"), 0, "a", "it ended")
            connecting.get(timeout=10)
            assert pool.submit(node.status).result(10).node == "n"
            assert pool.submit(node.store_rate, StoreAddress("memory://hanging")).result(10) == 0.0
            pool.submit(node.rank_disconnected, StoreAddress("memory://other"), 0, "a", "it ended").result(10)
            assert "memory://other" in node.status().uploaded
        finally:
            end.set()


def test_a_frozen_head_node_does_not_stop_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for it without end, and no copy would be sent meanwhile. It is asked once, and its late answer is used."""
    asked, end = list[int](), threading.Event()

    def nodes() -> list[dict[str, Any]]:
        asked.append(1)
        assert end.wait(30)
        return [{"NodeID": name, "Alive": True, "Labels": {"zone": "z"}} for name in ("a", "b")]

    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [{"name": f"{NODE}a"}])
    FakeRay().replace(monkeypatch, "nodes").nodes = nodes  # type: ignore[method-assign]
    connect_without_ray(monkeypatch, "a")
    peers = RayPeers()
    peers.census_patience = 0.1
    with ThreadPoolExecutor() as pool:
        try:
            for _ in range(2):
                with pytest.raises(ClusterError, match="the head node at nowhere: does not answer within"):
                    pool.submit(peers.nodes).result(10)
        finally:
            end.set()
        peers.census_patience = 10.0
        assert pool.submit(peers.nodes).result(10) == {"a": "z"}
    assert len(asked) == 1
    assert peers.nodes() == {"a": "z"}
    assert len(asked) == 2
