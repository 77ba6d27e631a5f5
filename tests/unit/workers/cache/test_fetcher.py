"""The fetcher reads the bytes that ranks request from the nearest source, and reads each byte once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from helpers.pack_memory import opened

from raystow.storage.errors import ClusterError, NotFound
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.node_peers import NodePeers
from raystow.workers.protocol.messages import AttemptKey, ReadCached

DATA = os.urandom(1000)


class Nodes(NodePeers):
    """Other nodes: the objects that each node has in memory. ``None``: reads from the node fail."""

    def __init__(self, **memory: dict[str, bytes] | None) -> None:
        self.memory = memory

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        held = self.memory[node]
        if held is None:
            target[:5] = b"noise"
            raise ClusterError("died", subject=node)
        if key in held:
            target[:] = held[key][start : start + target.nbytes]
        return key in held


class FetchingNode:
    def __init__(self, nodes: Nodes, *, budget: int = 10_000) -> None:
        self.tier = MemoryTier(10_000)
        self.store = MemoryStore("fetcher")
        self.fetcher = Fetcher(self.tier, nodes, budget=budget)
        self.read = Counter[str]()
        self.visit = self.fetcher.visit()
        self.visit.__enter__()

    def close(self) -> None:
        self.visit.__exit__(None, None, None)

    def get(self, key: str, *spans: tuple[int, int], nearby: tuple[str, ...] = (), size: int = len(DATA)) -> list[bytes]:
        lent, self.whole = self.fetcher.get(ReadCached("r", key, size, spans, nearby), self.store, self.read)
        with open(lent.descriptor, "rb") as file:
            return [os.pread(file.fileno(), end - start, start) for start, end in spans]


@pytest.fixture
def make() -> Callable[..., FetchingNode]:
    return FetchingNode


def test_sources_are_memory_then_peers_then_the_store(make, caplog):
    world = make(Nodes(a={"pack": DATA}, b=None, c={}))
    assert world.get("pack", (0, 10), nearby=("c", "b", "a")) == [DATA[:10]]
    assert world.read == {"peer": 10}
    assert "another node: b: died" in caplog.text
    world.store.put("pack", [DATA])
    assert world.get("pack", (0, 20), (900, 1000)) == [DATA[:20], DATA[900:]]
    assert world.read == {"peer": 10, "store": 110}
    assert not world.whole
    world.tier.put(AttemptKey("r", 1, "a"), 0, "pack", [DATA])
    assert world.get("pack", (0, 1000), nearby=("a",)) == [DATA]
    assert world.read == {"memory": 1000, "peer": 10, "store": 110}
    assert world.whole


def test_an_object_that_is_nowhere_raises_not_found(make):
    with pytest.raises(NotFound):
        make(Nodes()).get("pack", (0, 10))


def test_fetched_bytes_stay_within_the_budget(make):
    world = make(Nodes(), budget=100)
    for key in ("a", "b", "c"):
        world.store.put(key, [DATA])
        world.get(key, (0, 60))
    world.get("c", (0, 60))  # still cached
    assert world.read["store"] == 180
    world.get("a", (0, 60))  # evicted before
    assert world.read["store"] == 240


def test_fetched_bytes_are_freed_with_the_last_visit(make):
    world = make(Nodes())
    world.store.put("pack", [DATA])
    with world.fetcher.visit():
        world.get("pack", (0, 10))
        world.close()
        world.get("pack", (0, 10))
        assert world.read["store"] == 10
    with world.fetcher.visit():
        world.get("pack", (0, 10))
        assert world.read["store"] == 20


def test_memory_of_another_size_is_freed_when_it_is_replaced(make):
    before, world = opened(), make(Nodes())
    world.store.put("pack", [DATA])
    for size in (1000, 900):
        world.get("pack", (0, 10), size=size)
    world.close()
    assert not opened() - before
