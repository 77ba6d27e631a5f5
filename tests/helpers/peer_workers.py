"""The parts of node workers that communicate with other nodes, over real sockets on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from helpers.fake_clock import FakeClock
from raystow.storage.errors import ClusterError
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node.peer_server import PeerLimits, PeerServer
from raystow.workers.protocol.messages import Contact
from raystow.workers.replication.peers import Peers
from raystow.workers.replication.replica_store import ReplicaStore
from raystow.workers.usage import Usage


class ListedPeers(Peers):
    """Peers among which the nodes in ``zones`` keep copies of entries."""

    def __init__(self, find: Callable[[str], Contact], clock: FakeClock, zones: Mapping[str, str]) -> None:
        super().__init__(find, clock)
        self._zones = zones

    def nodes(self) -> Mapping[str, str]:
        return self._zones


class Worker:
    """The parts of a node worker that communicate with other nodes."""

    def __init__(self, name: str, cluster: Cluster, *, budget: int = 1 << 30) -> None:
        clock = cluster.clock
        self.tier = MemoryTier(1 << 30)
        self.peers = ListedPeers(cluster.find, clock, cluster.zones)
        self.fetcher = Fetcher(self.tier, self.peers, budget=budget, node=name)
        self.journal = NodeJournal(name, 1 << 20, self.peers, clock)
        self.peer_server = PeerServer(
            "127.0.0.1",
            self.fetcher,
            ReplicaStore(self.tier),
            self.journal,
            usage=Usage(clock),
            tls=cluster.tls,
            limits=cluster.limits,
        )
        self.reads = list[Counter[str]]()  # read bytes by source, one counter per call
        self._visit = self.fetcher.visit()
        self._visit.__enter__()

    @property
    def read(self) -> Counter[str]:
        return sum(self.reads, Counter[str]())

    def close(self) -> None:
        self._visit.__exit__(None, None, None)
        self.peer_server.close()
        self.journal.close()
        self.peers.close()


class Cluster:
    """Node workers by name. ``find`` stands for the lookup in Ray. ``lines``: what others reach in place of a node.
    ``limits``: those of nodes that start from now on.
    ``zones``: of nodes that keep copies of entries."""

    def __init__(self, *, tls: bool = False) -> None:
        self.limits = PeerLimits()
        self.lines, self.zones = dict[str, Contact](), dict[str, str]()
        self.clock, self.workers, self.tls = FakeClock(), dict[str, Worker](), tls
        self.asked = Counter[str]()

    def find(self, node: str) -> Contact:
        self.asked[node] += 1
        if node not in self.workers:
            raise ClusterError("there is no such node", subject=node)
        return self.lines.get(node, self.workers[node].peer_server.contact)

    def start(self, *names: str, budget: int = 1 << 30) -> None:
        for name in names:
            if name in self.workers:
                self.kill(name)
            self.workers[name] = Worker(name, self, budget=budget)

    def kill(self, name: str) -> None:
        self.workers.pop(name).close()

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]
