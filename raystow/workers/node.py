"""The node worker: one for each node, whatever the number of its ranks and runs. A plain class; Ray stands in ``node_actor``."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..storage.clock import SYSTEM
from ..storage.errors import ClusterError, NotARepository, RaystowError, SaveFailed
from ..storage.format.boxes import Box
from ..storage.log import about
from ..storage.repository import open_repository
from ..storage.stores import open_store
from .fetching.fetcher import Fetcher, Nowhere, Others
from .fetching.lender import lend
from .ipc.wire import Connection, Listener
from .memory.former import Former
from .memory.host_memory import memory_limit
from .memory.keeping import keeper
from .memory.memory_tier import Holding, Home, MemoryTier
from .network.copies import Guests
from .network.exchange import Exchange
from .network.line import Contact
from .network.replication import Neighbours, Nobody, Replicator
from .packing.attempt import NodeAttempt, Outcome, Workshop, warm_up
from .packing.budget import Budget
from .packing.metered import Metered
from .packing.staleness import OptimizerWatch
from .port import Begin, Port, Ticket
from .priority import give_way
from .progress import Saves, SavesHere
from .session import Session
from .status import NodeStatus, measure

logger = logging.getLogger(__name__)

_UPLOADS = max(4, min(32, os.cpu_count() or 1))
_SEALERS = max(4, (os.cpu_count() or 1) // 4)  # a few cores move what memory can: more would only keep the training from them
_MEASURE = 5.0  # seconds from one value of a gauge to the next


@dataclass(frozen=True)
class _Repository:
    """What a node needs for the saves to one repository."""

    port: Port
    store: Metered
    watch: OptimizerWatch


class Node:
    """Accepts training processes of this machine and stores what they stage.

    ``connect(uri)`` gives the port to the coordinator of a repository. ``host``: the address at which other nodes reach this one,
    with what ``contact`` says; ``others``: how this one reaches them. Memory: for each training process the ring and the coded
    bytes that it asked for, and about 9 MiB of scratch for each coding thread; a quarter of the machine's for the newest version,
    unless ``keep_in_memory`` says otherwise, and a quarter of that for what restoring processes read from elsewhere.
    ``when_warm``: called once, on a coding thread, when what those need is loaded.
    """

    def __init__(
        self,
        node: str,
        connect: Callable[[str], Port],
        *,
        others: Others | None = None,
        neighbours: Neighbours | None = None,
        host: str = "127.0.0.1",
        threads: int | None = None,
        when_warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._node, self._connect = node, connect
        self._keep = memory_limit() // 4
        self._tier = MemoryTier(self._keep)
        self._fetcher = Fetcher(self._tier, others or Nowhere(), budget=self._keep // 4, node=node)
        self.guests, self.replicator = Guests(self._tier), Replicator(node, self._tier, neighbours or Nobody(), SYSTEM)
        self._exchange = Exchange(host, self._fetcher, self.guests)
        self._workshop = Workshop(
            coders=ThreadPoolExecutor(threads or os.cpu_count() or 1, "raystow-code", initializer=give_way),
            sealers=ThreadPoolExecutor(_SEALERS, "raystow-seal", initializer=give_way),
            uploads=ThreadPoolExecutor(_UPLOADS, "raystow-upload", initializer=give_way),
            budget=Budget(),
        )
        self._threads = max(1, (threads or os.cpu_count() or 1) // 2)  # that decode planes
        self._unfolding = ThreadPoolExecutor(1, "raystow-unfolding")
        self._lock = threading.Lock()
        self._repositories: dict[str, _Repository] = {}  # by URI
        self._attempts: dict[tuple[str, str], NodeAttempt] = {}
        self._formers: dict[Home, Former] = {}
        self._raw = 0  # bytes coded in attempts that are over
        self._closed = threading.Event()
        self._saves = SavesHere()
        self._shared: set[tuple[str, str]] = set()  # repositories by URI and id, seen from here to be what others see
        self._listener = Listener(f"raystow-{os.getpid()}-{SYSTEM.token()}")
        for _ in range(threads or os.cpu_count() or 1):
            self._workshop.coders.submit(warm_up)
        self._workshop.coders.submit(when_warm)  # comes up when the first of them is through: it has loaded all
        threading.Thread(target=self._accept, name="raystow-accept", daemon=True).start()
        threading.Thread(target=self.replicator.run, name="raystow-copies", daemon=True).start()
        threading.Thread(target=self._measure, name="raystow-measure", daemon=True).start()

    @property
    def address(self) -> str:
        """Where training processes of this machine connect to."""
        return self._listener.name

    @property
    def contact(self) -> Contact:
        """Where other nodes connect to."""
        return self._exchange.contact

    def close(self) -> None:
        """Accept no more processes; those that are connected are served to their end."""
        self._closed.set()
        self._listener.close()
        self._exchange.close()
        self.replicator.close()
        self._workshop.coders.shutdown(wait=False)
        self._workshop.sealers.shutdown(wait=False)
        self._workshop.uploads.shutdown(wait=False)
        self._unfolding.shutdown(wait=False, cancel_futures=True)
        self._tier.close()

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            threading.Thread(target=self._serve, args=(connection,), name="raystow-session", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        received = connection.receive()
        if received is not None and "key" in received[0]:
            with contextlib.closing(connection), contextlib.suppress(ClusterError), self._fetcher.visit():
                lend(connection, received[0], self._fetcher, lambda uri: self._repository(uri).store)
        elif received is not None:
            with self._saves.rank(received[0]["uri"]):
                Session(connection, self, self._node).serve(received[0])

    def status(self) -> NodeStatus:
        """What this node is at."""
        with self._lock:
            stores = {uri: known.store for uri, known in self._repositories.items()}
            attempts = list(self._attempts.values())
            raw = self._raw + sum(attempt.raw for attempt in attempts)
        return NodeStatus(
            node=self._node,
            at=SYSTEM.monotonic(),
            raw=raw,
            uploaded={uri: store.nbytes for uri, store in stores.items()},
            uploads=sum(store.under_way for store in stores.values()),
            queue=self._workshop.budget.used,
            queue_limit=self._workshop.budget.total,
            memory=self._tier.used,
            spare=self._tier.spare,
            memory_limit=self._tier.budget,
            copies=self.replicator.progress,
            ranks=self._saves.connected(),
            attempts=tuple(attempt.status() for attempt in attempts if not attempt.over),
        )

    def _measure(self) -> None:
        while not self._closed.wait(_MEASURE):
            measure(self.status())

    def keep_in_memory(self, nbytes: int | None) -> None:
        """See ``session.Host``."""
        self._tier.resize(self._keep if nbytes is None else nbytes)

    def replicate(self, repository: str, replicas: int, rate: float | None) -> None:
        """See ``session.Host``."""
        self.replicator.want(repository, replicas, rate)

    def holdings(self, repository: str) -> list[Holding]:
        """What this node's memory has of a repository."""
        return self._tier.holdings(repository)

    def saves(self) -> dict[str, Saves]:
        """How far the saves are of the ranks connected, by the URI of the repository."""
        return self._saves.now()

    def grow(self, nbytes: int) -> None:
        """See ``session.Host``."""
        self._workshop.budget.grow(nbytes)

    def store_rate(self, uri: str) -> float:
        """See ``session.Host``."""
        with self._lock:
            known = self._repositories.get(uri)
        return known.store.rate if known else 0.0

    def farewell(self, uri: str, rank: int, incarnation: str, reason: str) -> None:
        """See ``session.Host``."""
        try:
            self._repository(uri).port.gone(rank, incarnation, reason)
        except RaystowError as error:
            about(logger, repository=uri, rank=rank).warning("the coordinator does not hear that %s: %s", reason, error)

    def _repository(self, uri: str) -> _Repository:
        with self._lock:
            if uri not in self._repositories:
                self._repositories[uri] = _Repository(self._connect(uri), Metered(open_store(uri), SYSTEM), OptimizerWatch(uri))
            return self._repositories[uri]

    def open_attempt(self, uri: str, repository: str, begin: Begin) -> tuple[NodeAttempt, int]:
        """See ``session.Host``. A folder that this node does not share with the coordinator is refused before a byte is lost."""
        here = self._repository(uri)
        if (uri, repository) not in self._shared:
            try:
                same = open_repository(uri).id == repository
            except NotARepository:
                same = False
            if not same:
                raise SaveFailed(
                    "this node sees another folder there than the coordinator", subject=uri, remedy="use one all nodes share"
                )
            self._shared.add((uri, repository))
        ticket = here.port.begin(begin)
        with self._lock:
            self._raw += sum(attempt.raw for attempt in self._attempts.values() if attempt.over)
            self._attempts = {key: attempt for key, attempt in self._attempts.items() if not attempt.over}
            key = uri, ticket.attempt
            if key not in self._attempts:
                home = Home(repository, ticket.id, ticket.attempt)
                keep = keeper(self._tier, home, ticket.node, self.replicator.wake)
                made = NodeAttempt(here.store, here.port, ticket, self._workshop, here.watch, keep, self._former(home, ticket))
                attempt = self._attempts[key] = made
                number = self._saves.begin(uri)
                attempt.on_end(lambda outcome, _: self._settle(uri, number, home, attempt, outcome))
            return self._attempts[key], ticket.node

    def _former(self, home: Home, ticket: Ticket) -> Former | None:
        """What the chunks of an attempt may be differences to, as far as it is here; that stays for as long as the attempt
        does."""
        if ticket.base is None:
            return None
        base = Home(home.repository, ticket.base.id, ticket.base.attempt)
        self._tier.lean(home, base)
        return self._former_at(base)

    def _former_at(self, home: Home) -> Former:
        """What is here of a version, under the lock; of those that are here no more all is forgotten."""
        self._formers = {other: former for other, former in self._formers.items() if other in self._tier}
        return self._formers.setdefault(home, Former(self._tier, home))

    def _settle(self, uri: str, number: int, home: Home, attempt: NodeAttempt, outcome: Outcome) -> None:
        if isinstance(outcome, RaystowError):
            self._tier.given_up(home)
            self.replicator.give_up(home)
        else:
            self._saves.settle(uri, number)
            self._tier.committed(home, alone=not outcome.bases)
            self.replicator.wake()
            if attempt.serves and attempt.on_gpu and not outcome.bases:
                with self._lock:
                    former = self._former_at(home)
                with contextlib.suppress(RuntimeError):  # this node worker is being closed
                    self._unfolding.submit(self._unfold, former, attempt.on_gpu)

    def _unfold(self, former: Former, wanted: Collection[tuple[str, Box]]) -> None:
        try:
            former.unfold(wanted, threads=self._threads)
        except Exception:
            logger.exception("GPUs decode planes of version %d in every save that differs from it", former.home.id)
