"""The node worker: one for each node, whatever the number of its ranks and runs. A plain class; Ray stands in ``node_actor``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..storage.clock import SYSTEM
from ..storage.errors import NotARepository, RaystowError, SaveFailed
from ..storage.repository import open_repository
from ..storage.stores import open_store
from .attempt import NodeAttempt, Workshop, warm_up
from .budget import Budget
from .metered import Metered
from .port import Begin, Port
from .session import Session
from .staleness import OptimizerWatch
from .wire import Connection, Listener

logger = logging.getLogger(__name__)

_UPLOADS = max(4, min(16, os.cpu_count() or 1))


@dataclass(frozen=True)
class _Repository:
    """What a node needs for the saves to one repository."""

    port: Port
    store: Metered
    watch: OptimizerWatch


class Node:
    """Accepts training processes of this machine and stores what they stage.

    ``connect(uri)`` gives the port to the coordinator of a repository. Memory: for each training process the ring and the coded
    bytes that it asked for, and about 9 MiB of scratch for each coding thread.
    """

    def __init__(self, node: str, connect: Callable[[str], Port], *, threads: int | None = None) -> None:
        self._node, self._connect = node, connect
        self._workshop = Workshop(
            coders=ThreadPoolExecutor(threads or os.cpu_count() or 1, "raystow-code"),
            uploads=ThreadPoolExecutor(_UPLOADS, "raystow-upload"),
            budget=Budget(),
        )
        self._lock = threading.Lock()
        self._repositories: dict[str, _Repository] = {}  # by URI
        self._attempts: dict[tuple[str, str], NodeAttempt] = {}
        self._shared: set[tuple[str, str]] = set()  # repositories by URI and id, seen from here to be what others see
        self._listener = Listener(f"raystow-{os.getpid()}-{SYSTEM.token()}")
        for _ in range(threads or os.cpu_count() or 1):
            self._workshop.coders.submit(warm_up)
        threading.Thread(target=self._accept, name="raystow-accept", daemon=True).start()

    @property
    def address(self) -> str:
        """Where training processes of this machine connect to."""
        return self._listener.name

    def close(self) -> None:
        """Accept no more processes; those that are connected are served to their end."""
        self._listener.close()
        self._workshop.coders.shutdown(wait=False)
        self._workshop.uploads.shutdown(wait=False)

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            threading.Thread(target=self._serve, args=(connection,), name="raystow-session", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        Session(connection, self, self._node).serve()

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
            logger.warning("the coordinator does not hear that %s: %s", reason, error)

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
            self._attempts = {key: attempt for key, attempt in self._attempts.items() if not attempt.over}
            key = uri, ticket.attempt
            if key not in self._attempts:
                self._attempts[key] = NodeAttempt(here.store, here.port, ticket, self._workshop, here.watch)
            return self._attempts[key], ticket.node
