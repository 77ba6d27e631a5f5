"""The node worker: one for each node, whatever the number of its ranks and runs. Knows nothing of Ray: see ``node.actor``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from ...storage.errors import ClusterError, NotARepository, RaystowError, SaveFailed
from ...storage.log import about
from ...storage.object_store import Buffer, ObjectStore
from ...storage.repository import open_repository
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.memory_budget import MemoryBudget
from ...storage.stores import open_store
from ...storage.stores.settings import JobSettings, StoreAddress
from ..cache.base_version import BaseVersion, KnownChunks
from ..cache.cache_server import serve_reads
from ..cache.fetcher import Fetcher
from ..cache.host_memory import memory_limit
from ..cache.tier import MemoryTier
from ..chosen_codec import ChosenCodec
from ..journal.node_journal import NodeJournal
from ..node_peers import NodePeers
from ..packing.attempt import Executors, NodeAttempt, Outcome
from ..packing.chunk_writer import warm_up
from ..packing.host_coding import HostCoding
from ..packing.metered_store import Metered
from ..packing.stale_state import OptimizerWatch
from ..protocol import peer_tls
from ..protocol.coordinator_client import CoordinatorClient
from ..protocol.messages import (
    Acknowledged,
    AttemptKey,
    Begin,
    Contact,
    Holding,
    Incarnation,
    KeepNode,
    NodeStatus,
    OpenJournal,
    OpenSession,
    OpenStore,
    RankDisconnected,
    ReadCached,
    RenewSettings,
    Saves,
    Ticket,
)
from ..protocol.unix_channel import Connection, Listener
from ..replication.replica_store import ReplicaStore
from ..replication.replicator import Replicator
from ..shm.slots import Slots, SlotUse
from ..thread_priority import give_way
from ..usage import Usage
from .gauges import measure
from .peer_server import PeerServer
from .save_progress import SavesHere
from .session import Session

logger = logging.getLogger(__name__)

_SEALERS = max(4, (os.cpu_count() or 1) // 4)  # a few cores saturate memory: more would only slow the training
_KNOWN = 2  # versions of a repository whose rows are kept: the base of the saves under way, and that of the next
_MEASURE = 5.0  # seconds from one value of a gauge to the next


def _has_newer(store: ObjectStore, repository: str, id: int, step: int | None) -> bool:
    """Whether the repository has a version with this id or a later one, and one of this step or a later one, or is gone: nobody
    can use an older save or older steps any more. False where this is not known."""
    try:
        there = open_repository(store)
        newest = there.root().versions[-1:]
    except NotARepository:
        return True
    except RaystowError:
        return False
    return there.id != repository or any(one.id >= id and (step is None or one.step >= step) for one in newest)


@dataclass(frozen=True)
class _Repository:
    """What a node needs for the saves to one repository."""

    coordinator: CoordinatorClient
    store: Metered
    watch: OptimizerWatch


class Node:
    """Accepts training processes of this machine and stores what they stage.

    Memory: for each training process the ring and the coded bytes that it asks for; about 9 MiB for each coding thread, and 1 MiB
    for each thread that writes to a local disk; for the newest version a quarter of the machine's memory (see ``limit_cache``),
    and a quarter of that for bytes that restoring processes read from elsewhere.

    Args:
        node: The name of this node.
        connect: Returns the coordinator of the repository at a URI, with what returns the settings of its store.
        peers: The other nodes.
        host: The address at which other nodes reach this one.
        threads: That code.
        usage: Whether it is used, see ``end_if_unused``.
        when_warm: Called once, on a coding thread, when these have loaded what they need.
    """

    def __init__(
        self,
        node: str,
        connect: Callable[[str, JobSettings], CoordinatorClient],
        *,
        peers: NodePeers | None = None,
        host: str = "127.0.0.1",
        threads: int | None = None,
        usage: Usage | None = None,
        when_warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._node, self._connect, self.usage = node, connect, usage or Usage(SYSTEM)
        self._keep = memory_limit() // 4
        self._tier = MemoryTier(self._keep)
        peers = peers or NodePeers()
        self._fetcher = Fetcher(self._tier, peers, budget=self._keep // 4, node=node)
        self.replicas = ReplicaStore(self._tier)
        self.replicator = Replicator(node, self._tier, peers, SYSTEM, stores=self.replicas.stores)
        self.journal = NodeJournal(node, memory_limit() // 8, peers, SYSTEM, open_repository=self._repository_ends)
        self._peer_server = PeerServer(host, self._fetcher, self.replicas, self.journal, usage=self.usage, tls=peer_tls.wanted())
        self._executors = Executors(
            coders=ThreadPoolExecutor(threads or os.cpu_count() or 1, "raystow-code", initializer=give_way),
            sealers=ThreadPoolExecutor(_SEALERS, "raystow-seal", initializer=give_way),
            budget=MemoryBudget(),
        )
        self._host_coding = HostCoding(threads)
        self._lock = threading.Lock()
        self._repositories: dict[StoreAddress, _Repository] = {}
        self._settings: dict[StoreAddress, JobSettings] = {}
        self._staying: dict[Connection, str] = {}  # the repository URIs of training processes, by their connections
        self._attempts: dict[tuple[StoreAddress, str], NodeAttempt] = {}
        self._known: dict[str, deque[KnownChunks]] = defaultdict(lambda: deque(maxlen=_KNOWN))  # by repository
        self._raw = 0  # bytes coded in attempts that are over
        self._closed = threading.Event()
        self._saves = SavesHere()
        self._shared: set[tuple[StoreAddress, str]] = set()  # by store and id: seen as the coordinator does
        self._listener = Listener(f"raystow-{os.getpid()}-{SYSTEM.token()}")
        for _ in range(threads or os.cpu_count() or 1):
            background.submit(self._executors.coders, "raystow-code", warm_up)
        # Runs when the first of them is done: everything is loaded then.
        background.submit(self._executors.coders, "raystow-code", when_warm)
        background.repeat("raystow-accept", self._accept)
        background.repeat("raystow-copies", self.replicator.run)
        background.repeat("raystow-measure", self._measure)

    @property
    def address(self) -> str:
        """Where training processes of this machine connect to."""
        return self._listener.name

    @property
    def contact(self) -> Contact:
        """Where other nodes connect to."""
        return self._peer_server.contact

    def close(self) -> None:
        """Accept no more processes; connected ones are served until they disconnect."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.close()
        self._peer_server.close()
        self.replicator.close()
        self.journal.close()
        self._executors.coders.shutdown(wait=False)
        self._executors.sealers.shutdown(wait=False)
        self._tier.close()

    def _accept(self) -> bool:
        if (connection := self._listener.accept()) is None:
            return False
        try:
            background.start("raystow-session", self._serve, connection)
        except RuntimeError:  # no more threads
            connection.close()
            raise
        return True

    def _serve(self, connection: Connection) -> None:
        with self.usage.visit(), contextlib.closing(connection):
            try:
                connection.handshake("a process of this node")
                received = connection.receive(OpenStore, OpenSession, ReadCached, OpenJournal, KeepNode)
                match received and received[0]:
                    case OpenStore(uri, settings):
                        self._settings_of(StoreAddress(uri, settings.place)).use(settings)
                        connection.send(Acknowledged())
                    case OpenSession() as opening:
                        self.replicas.stores[opening.repository] = opening.store
                        with self._saves.rank(opening.uri):
                            Session(connection, self, self._node, opening).serve()
                    case OpenJournal() as journal:
                        self.replicas.stores[journal.repository] = journal.store
                        self.journal.serve(connection, journal)
                    case KeepNode() as keep:
                        self._serve_stay(connection, keep)
                    case ReadCached() as first:
                        with self._fetcher.visit():
                            serve_reads(connection, first, self._fetcher, lambda store: self._repository(store).store)
            except ClusterError as error:
                logger.info("a connection from a process of this node has ended: %s", error)

    def _serve_stay(self, connection: Connection, message: KeepNode) -> None:
        seconds = message.seconds
        self.usage.began(message.uri)
        try:
            with self._asked_for_settings(connection, message.uri):
                connection.send(Acknowledged())
                while (received := connection.receive(KeepNode)) is not None:
                    seconds = received[0].seconds
        finally:
            self.usage.left(message.uri, seconds)

    @contextlib.contextmanager
    def _asked_for_settings(self, connection: Connection, uri: str) -> Iterator[None]:
        with self._lock:
            self._staying[connection] = uri
        try:
            yield
        finally:
            with self._lock:
                del self._staying[connection]

    def ask_for_settings(self, uri: str) -> int:
        """Let the connected training processes of the repository at ``uri`` send the settings of its store to their actors.
        Returns their number."""
        with self._lock:
            asked = [connection for connection, of in self._staying.items() if of == uri]
        for connection in asked:
            connection.post(RenewSettings())
        return len(asked)

    def expect(self) -> bool:
        """See ``Usage.expect``."""
        return self.usage.expect()

    def end_if_unused(self) -> bool:
        """Accept nothing more if nobody uses this node worker, and the store has all that is in its memory. Returns whether so.

        A process that got this address before may still come: then the worker stays.
        """
        if not self.usage.over:
            return False
        if self._is_needed():
            self.usage.expect()  # so that the store is not asked all the time
            return False
        if not self.usage.end():
            return False
        self.close()
        return True

    def _is_needed(self) -> bool:
        """Whether there is something in progress, or in memory, that the store does not have."""
        with self._lock:
            attempts = list(self._attempts.values())
        if any(not attempt.over for attempt in attempts):
            return True
        for repository in self._tier.repositories() | self.journal.store.repositories():
            held = [held.attempt.id for held in self._tier.holdings(repository) if held.whole and not held.committed]
            step = self.journal.store.newest_unstored(repository)
            if not held and step is None:
                continue
            at = self.replicas.stores.get(repository)
            if at is None or not _has_newer(self._open_store(at), repository, max(held, default=0), step):
                return True
        return False

    def status(self) -> NodeStatus:
        """Return the state of this node."""
        with self._lock:
            stores = [(at.uri, known.store) for at, known in self._repositories.items()]
            attempts = list(self._attempts.values())
            raw = self._raw + sum(attempt.raw for attempt in attempts)
        under_way = [attempt for attempt in attempts if not attempt.over]
        return NodeStatus(
            node=self._node,
            at=SYSTEM.monotonic(),
            raw=raw,
            uploaded={uri: sum(store.nbytes for of, store in stores if of == uri) for uri, _ in stores},
            uploads=sum(store.under_way for _, store in stores),
            queue=self._executors.budget.used,
            queue_limit=self._executors.budget.total,
            memory=self._tier.used,
            spare=self._tier.spare,
            memory_limit=self._tier.budget,
            copies=self.replicator.progress,
            ranks=self._saves.connected(),
            attempts={uri: tuple(one.status() for one in under_way if one.uri == uri) for uri in {one.uri for one in under_way}},
        )

    def _measure(self) -> bool:
        if self._closed.wait(_MEASURE):
            return False
        measure(self.status())
        self.journal.measure()
        return True

    def limit_cache(self, nbytes: int | None) -> None:
        """See ``session.SessionHost``."""
        self._tier.resize(self._keep if nbytes is None else nbytes)

    def admit(self, slots: Slots) -> bool:
        """See ``session.SessionHost``."""
        return self._tier.admit(slots)

    def make_way(self, slots: Slots, attempt: AttemptKey, nbytes: int) -> None:
        """See ``session.SessionHost``."""
        self._tier.make_way(slots, attempt, nbytes)

    def replicate(self, repository: str, replicas: int, rate: float | None) -> None:
        """See ``session.SessionHost``."""
        self.replicator.want(repository, replicas, rate)

    def holdings(self, repository: str) -> list[Holding]:
        """Return what this node's memory holds of a repository."""
        return self._tier.holdings(repository)

    def saves(self) -> dict[str, Saves]:
        """Return the progress of the saves of the connected ranks, by the URI of the repository."""
        return self._saves.now()

    def grow(self, nbytes: int) -> None:
        """See ``session.SessionHost``."""
        self._executors.budget.grow(nbytes)

    def store_rate(self, store: StoreAddress) -> float:
        """See ``session.SessionHost``."""
        with self._lock:
            known = self._repositories.get(store)
        return known.store.rate if known else 0.0

    def host_coding(self, store: StoreAddress) -> ChosenCodec:
        """See ``session.SessionHost``."""
        return self._host_coding.choose(self.store_rate(store))

    def rank_disconnected(self, store: StoreAddress, rank: int, incarnation: Incarnation, reason: str) -> None:
        """See ``session.SessionHost``."""
        try:
            self._repository(store).coordinator.ask(RankDisconnected(rank, incarnation, reason))
        except RaystowError as error:
            about(logger, repository=store.uri, rank=rank).warning("the coordinator did not receive that %s: %s", reason, error)

    def _settings_of(self, store: StoreAddress) -> JobSettings:
        with self._lock:
            return self._settings.setdefault(store, JobSettings(store, lambda: self.ask_for_settings(store.uri)))

    def _open_store(self, at: StoreAddress) -> ObjectStore:
        return open_store(at.uri, kept=True, settings=self._settings_of(at).given)

    def _repository(self, at: StoreAddress) -> _Repository:
        with self._lock:
            known = self._repositories.get(at)
        if known is None:  # outside the lock: while Ray's head node is frozen, it takes a minute to connect
            store, coordinator = self._open_store(at), self._connect(at.uri, self._settings_of(at))
            made = _Repository(coordinator, Metered(store, SYSTEM), OptimizerWatch(at.uri))
            with self._lock:
                known = self._repositories.setdefault(at, made)
        return known

    def _repository_ends(self, at: StoreAddress) -> tuple[ObjectStore, CoordinatorClient]:
        here = self._repository(at)
        return cast(ObjectStore, here.store), here.coordinator

    def open_attempt(self, store: StoreAddress, repository: str, begin: Begin) -> tuple[NodeAttempt, int]:
        """See ``session.SessionHost``. Refuses a folder that this node does not share with the coordinator."""
        here = self._repository(store)
        if (store, repository) not in self._shared:
            try:
                same = open_repository(cast(ObjectStore, here.store)).id == repository
            except NotARepository:
                same = False
            if not same:
                raise SaveFailed(
                    "this node sees another folder there than the coordinator",
                    subject=store.uri,
                    remedy="use one all nodes share",
                )
            self._shared.add((store, repository))
        ticket = here.coordinator.ask(begin)
        with self._lock:
            self._raw += sum(attempt.raw for attempt in self._attempts.values() if attempt.over)
            self._attempts = {key: attempt for key, attempt in self._attempts.items() if not attempt.over}
            if (store, ticket.attempt) not in self._attempts:
                key = AttemptKey(repository, ticket.id, ticket.attempt)
                keep, base = functools.partial(self._keep_object, key, ticket.node), self._base(key, ticket)
                attempt = NodeAttempt(here.store, here.coordinator, ticket, self._executors, here.watch, keep, base)
                self._attempts[store, ticket.attempt] = attempt
                number = self._saves.begin(store.uri)
                attempt.on_end(lambda outcome, _: self._settle(store.uri, number, key, ticket, attempt, outcome))
            return self._attempts[store, ticket.attempt], ticket.node

    def _keep_object(
        self, attempt: AttemptKey, node: int, key: str, parts: Sequence[Buffer], uses: Sequence[SlotUse]
    ) -> memoryview | None:
        """Keep an object in memory, and copy it to other nodes: see ``packer.Keep``."""
        copy = self._tier.put(attempt, node, key, parts, uses=uses)
        self.replicator.wake()
        return copy

    def _base(self, key: AttemptKey, ticket: Ticket) -> BaseVersion | None:
        """Return the version that an attempt is compared with, if this node has written a part of it."""
        if ticket.base is None:
            return None
        base = AttemptKey(key.repository, ticket.base.id, ticket.base.attempt)
        if ticket.deltas:  # its packs are needed until the attempt ends
            self._tier.set_base(key, base)
        known = next((known for known in self._known[key.repository] if known.attempt == base), None)
        return None if known is None else BaseVersion(self._tier, known, deltas=ticket.deltas)

    def _settle(self, uri: str, number: int, key: AttemptKey, ticket: Ticket, attempt: NodeAttempt, outcome: Outcome) -> None:
        if isinstance(outcome, RaystowError):
            self._tier.given_up(key)
            self.replicator.give_up(key)
            self.journal.store.save_failed(key.repository, ticket.step)
        else:
            self._saves.settle(uri, number)
            known = attempt.known(key)
            if (nearest := known.nearest(outcome.bases)) is not None:
                self._tier.set_base(key, nearest)
            if not (ticket.deltas and outcome.bases):  # the coordinator may name it as a base
                self._known[key.repository].append(known)
            self._tier.committed(key, alone=not outcome.bases)
            self.journal.committed(key.repository, outcome.step)
            self.replicator.wake()
