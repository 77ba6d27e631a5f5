"""Connects a rank to its cluster, and starts the actors that it needs while its program goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FuturesTimeout
from weakref import WeakValueDictionary

from ...storage.errors import ClusterError, RaystowError, StateError
from ...storage.format import key_files
from ...storage.format.parts import part_number
from ...storage.format.rank_spans import member_text
from ...storage.log import about, here
from ...storage.object_store import ObjectStore
from ...storage.repository import Repository
from ...storage.runtime import background
from ...storage.stores.settings import LOCAL, StoreSettings, settings_of
from ...workers import ray_metrics
from ...workers.node.actor import node_actor
from ...workers.protocol.messages import (
    PROTOCOL,
    Acknowledged,
    CoordinatorStarted,
    Incarnation,
    JoinRun,
    OnFenced,
    OpenStore,
    RankSaveFailed,
    RequestExport,
    StartRun,
    shortened,
)
from ...workers.protocol.unix_channel import Connection
from ...workers.ray_connection import RayConnection
from .. import ray_cluster
from ..coordinator.ray_client import RayCoordinatorClient
from .presence import Presence
from .settings_renewal import SettingsRenewal

logger = logging.getLogger(__name__)

ACTOR_START = 120.0
"""Seconds that an actor may take to start."""

_JOIN = 10.0  # seconds that ``close`` waits for the coordinator, which has answered this rank before

_newest: WeakValueDictionary[str, Future[CoordinatorStarted]] = WeakValueDictionary()
_making = threading.Lock()


def node_address(connection: RayConnection) -> str:
    """Return the address of this node's worker, which is started if there is none. It stays for some seconds even if unused."""

    def ask() -> str:
        worker = connection.ask(lambda: node_actor(RayCoordinatorClient), ACTOR_START)
        address: str = connection.call(lambda: worker.address.remote(PROTOCOL), ACTOR_START, "node worker")
        return address

    return connection.find(ask)


class Startup:
    """Connects to Ray; then starts the coordinator of ``uri`` and this node's worker, and registers the rank, on a thread of its
    own.

    Those of one process register in the order in which they were made: the newest one has the rank.

    Attributes:
        store: That of the repository.
        uri: The repository.
        connection: This process's connection to Ray.
        port: The coordinator.

    Args:
        part: This process has a part instead of the rank.
        exports: Returns what this process asks for when it has registered, and when it closes; None if nothing.
        keep: Seconds for which the node keeps its memory after ``close``.
    """

    def __init__(
        self,
        store: ObjectStore,
        rank: int,
        world_size: int,
        part: str,
        exports: Callable[[JoinRun], RequestExport | None],
        *,
        on_fenced: OnFenced,
        keep: float,
    ) -> None:
        self.store, self.uri, self._world_size, self._part = store, store.uri, world_size, part
        self._exports = exports
        self._rank = part_number(part) if part else rank
        self.connection = ray_cluster.connect()
        ray_metrics.export()
        here(node=self.connection.node)
        self._pid, self._process = os.getpid(), (ray_cluster.process_here(), ray_cluster.run_here())
        self._node = ""  # the address of the node worker, once it was asked for
        self._renewal: SettingsRenewal | None = None
        self.port = RayCoordinatorClient(self.uri, self._settings)
        self._presence = Presence(self.uri, keep, self.node_address, self._send_settings)
        self._started: Future[CoordinatorStarted] = Future()
        self._joining, self._closed, self._lock = False, False, threading.Lock()
        with _making:
            before, _newest[self.uri] = _newest.get(self.uri), self._started
        background.start("raystow-startup", self._run, StartRun(self.connection.job, on_fenced), before)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the Checkpointer. It has none of its threads."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise as ``wait``, but do not wait."""
        self.check_process()
        self.connection.check()

    def check_process(self) -> None:
        """Raise ``StateError`` in a child of the process that made the Checkpointer."""
        if self.forked:
            what = f"this Checkpointer belongs to process {self._pid}, from which this one was forked"
            raise StateError(what, subject=self.uri, remedy="make another one, in a process that is started by spawn")

    def wait(self) -> CoordinatorStarted:
        """Wait until the coordinator has started and knows this rank.

        Raises:
            ClusterError: It does not start, or this process has disconnected from its cluster.
            StoreError: It cannot read or write the store.
            UnsafeStore: The store has no atomic conditional writes.
            StateError: This is a child of the process that made the Checkpointer.
        """
        self.check_process()
        if not self._started.done():
            self.connection.check()
        try:
            return self._started.result(2 * ACTOR_START)
        except FuturesTimeout:
            raise ClusterError(f"did not start within {2 * ACTOR_START:.0f} s", subject=f"coordinator of {self.uri}") from None

    def repository(self) -> Repository:
        """Return the repository in its store; waits as ``wait``. ``open`` would read the store, but a version in memory can be
        restored while that is down."""
        started = self.wait()
        return Repository(self.store, started.repository, trust=key_files.trust(), signed_by=started.signed_by)

    def close(self, *, failed: bool = False) -> None:
        """Register no more: another Checkpointer that is made from now on, in any process, has the rank. ``failed``: the training
        has failed, and may be started again."""
        if not failed and self._started.done() and self._started.exception() is None:
            self._request_exports()  # pins since the last commit; what a coordinator that has died since has left
        self._presence.close(failed=failed)
        with self._lock:
            self._closed, joining = True, self._joining
            if self._renewal is not None:
                self._renewal.close()
        if joining:
            wait([self._started], _JOIN)

    def node_address(self) -> str:
        """Return the address of this node's worker, which is started if there is none, stays until ``close``, and knows how to
        reach the store."""
        self._node = node_address(self.connection)
        self._presence.announce(self._node)
        self._open_store(self._settings())
        return self._node

    @property
    def member(self) -> JoinRun:
        """The rank and its process. Waits, and raises, as ``wait``."""
        self.wait()
        return self._member

    def report_failure(self, number: int, step: int, what: str) -> bool:
        """Tell the coordinator that a save of this rank has failed. Returns whether it did not know."""
        reason = shortened(f"{member_text(self._rank)}: {what}")
        return self.port.ask(RankSaveFailed(self._rank, self.member.incarnation, number, step, reason)).first

    def _request_exports(self) -> None:
        """Ask for the exports that are due. An error is logged only: it affects no save."""
        if (request := self._exports(self._member)) is None:
            return
        try:
            self.connection.check()
            self.port.ask(request, timeout=_JOIN)
        except RaystowError as error:
            about(logger, repository=self.uri).warning("versions that are due are exported after the next commit: %s", error)

    def _settings(self, anew: bool = False) -> StoreSettings:
        return settings_of(self.store, anew=anew)

    def _send_settings(self) -> None:
        if self._renewal is not None:
            self._renewal.ask()

    def _renew(self, settings: StoreSettings) -> None:
        self._open_store(settings)
        self.port.open_store(settings)

    def _open_store(self, settings: StoreSettings) -> None:
        """Send settings of the store to the node worker, if it needs any and this process uses it."""
        if settings == LOCAL or not self._node:
            return
        with contextlib.closing(Connection.connect(self._node)) as connection:
            connection.send(OpenStore(self.uri, settings))
            if connection.receive(Acknowledged, timeout=ACTOR_START) is None:
                raise ClusterError("has ended", subject="node worker")

    def _run(self, run: StartRun, before: Future[CoordinatorStarted] | None) -> None:
        try:
            self.connection.ask(lambda: node_actor(RayCoordinatorClient), ACTOR_START)  # ready when the first save connects to it
            if before is not None:
                wait([before], ACTOR_START)
            settings = self._settings()
            self.port.open_store(timeout=ACTOR_START)
            answer = self.port.ask(run, timeout=ACTOR_START)
            who = Incarnation(answer.repository, answer.epoch, answer.number, *self._process)
            self._member = JoinRun(self._rank, who, self._world_size, self._part)
            with self._lock:
                if self._closed:
                    raise StateError("this Checkpointer is closed", subject=self.uri, remedy="make another one")
                self._joining = True
                if settings != LOCAL:
                    self._renewal = SettingsRenewal(self._settings, settings, self._renew)
            self.port.ask(self._member)
            self._started.set_result(answer)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._request_exports()
        with contextlib.suppress(ClusterError):  # a save or restore tries again, and raises
            self.node_address()
