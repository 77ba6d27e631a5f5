"""Keeps copies of this node's entries in the memory of its partner nodes.

A reconciler, as ``replication.Replicator`` is: it sends the next entry that a partner lacks, those first that a training process
waits for. A partner whose memory has another name than before was restarted, and gets all again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from ...storage.clock import Clock
from ...storage.errors import RaystowError
from ...storage.object_store import Buffer
from ..protocol.messages import EntryInfo, EntryKept, PutEntry
from ..replication.partners import partners
from .entry_store import EntryStore

logger = logging.getLogger(__name__)

_CENSUS = 30.0  # seconds between looks at which nodes there are, while there are enough
_LOOK = 3.0  # the same while there are too few
_SHUN = 30.0  # seconds for which a node that did not answer is no partner
_Done = Callable[[EntryKept], None]


class EntryPeers(Protocol):
    """The workers of other nodes. Methods raise ``ClusterError`` if one does not answer."""

    def nodes(self) -> Mapping[str, str]:
        """The nodes alive that have a worker, with their failure domains."""

    def put_entry(self, node: str, put: PutEntry, data: Buffer) -> EntryKept:
        """Give a node a copy, unless it has one. The answer names its memory."""


class EntryReplicator:
    """``step`` and ``run`` are called by one thread, the others by any."""

    def __init__(self, node: str, store: EntryStore, peers: EntryPeers, clock: Clock) -> None:
        self._node, self._store, self._peers, self._clock = node, store, peers, clock
        self._replicas: dict[str, int] = {}  # by repository
        self._waiting: dict[EntryInfo, _Done] = {}
        self._lock = threading.Lock()
        self._sent: dict[str, set[str]] = {}  # node -> repository and key of entries that it has
        self._memories: dict[str, str] = {}  # node -> name of its memory
        self._unsure = False
        self._zones: Mapping[str, str] = {}
        self._shunned: dict[str, float] = {}  # until when
        self._counted = -math.inf
        self._woken, self._closed = threading.Event(), False

    def want(self, repository: str, replicas: int) -> None:
        """Copy the entries of a repository to so many other nodes."""
        self._replicas = {**self._replicas, repository: replicas}
        self._woken.set()

    def submit(self, info: EntryInfo, done: _Done) -> None:
        """Copy a new entry; ``done`` is called when it has its copies, or there is no node for more."""
        with self._lock:
            self._waiting[info] = done
        self._woken.set()

    def wake(self) -> None:
        """Look for entries without copies, and ask partners again what they have: they may have been restarted."""
        self._unsure = True
        self._woken.set()

    def close(self) -> None:
        """Let ``run`` return."""
        self._closed = True
        self._woken.set()

    def run(self) -> bool:
        """Call ``step``, and wait until there may be something to do again. Returns False after ``close``."""
        pause = _LOOK
        try:
            pause = self.step() if not self._closed else 0.0
        finally:
            if self._woken.wait(pause):
                self._woken.clear()
        return not self._closed

    def step(self) -> float:
        """Send one entry; the seconds after which to look again, if nothing changes before."""
        if self._unsure:
            self._unsure = False
            self._sent.clear()
        with self._lock:
            waiting = list(self._waiting)
        own = self._store.own() if any(self._replicas.values()) else []
        if own or waiting:
            self._count()
        held = {_key(info) for info in own}
        for info in (*waiting, *reversed(own)):
            lacking = [node for node in self._partners(info) if _key(info) not in self._sent.setdefault(node, set())]
            if lacking and _key(info) in held:
                self._push(lacking[0], info)
                return 0.0
            with self._lock:
                done = self._waiting.pop(info, None)
            if done is not None:
                done(EntryKept(info.step, len(self._partners(info))))
        for sent in self._sent.values():
            sent &= held
        return _LOOK

    def _count(self) -> None:
        now = self._clock.monotonic()
        self._shunned = {node: until for node, until in self._shunned.items() if until > now}
        able = len(self._zones.keys() - self._shunned.keys() - {self._node})
        pause = _CENSUS if able >= max(self._replicas.values(), default=0) else _LOOK
        if now - self._counted >= pause:
            self._counted = now
            try:
                self._zones = self._peers.nodes()
            except RaystowError as error:
                logger.warning("it is not known which nodes there are: %s", error)

    def _partners(self, info: EntryInfo) -> tuple[str, ...]:
        able = {node: zone for node, zone in self._zones.items() if node not in self._shunned}
        return partners(able, self._replicas.get(info.repository, 0)).get(self._node, ())

    def _push(self, node: str, info: EntryInfo) -> None:
        data, sent = self._store.view(info), self._sent[node]
        if data is None:
            return  # it is not needed any more
        try:
            answer = self._peers.put_entry(node, PutEntry(info, self._store.oldest(info)), data)
        except RaystowError as error:
            logger.warning("no entries go to a node that does not answer, for %.0f s: %s", _SHUN, error)
            self._shunned[node] = self._clock.monotonic() + _SHUN
            self._sent.pop(node, None)
            self._counted = -math.inf
            return
        if answer.memory != self._memories.get(node):
            self._memories[node] = answer.memory
            sent.clear()
        if answer.problem:
            logger.warning("node %s keeps no copy of the entry of step %d: %s", node, info.step, answer.problem)
        sent.add(_key(info))


def _key(info: EntryInfo) -> str:
    return f"{info.repository} {info.key}"
