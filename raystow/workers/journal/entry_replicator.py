"""Keeps copies of this node's entries in the memory of its partner nodes.

It sends the next entry that a partner lacks, those first that a training process
waits for. A partner whose memory has another name than before was restarted, or has dropped entries, and gets all again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...storage.errors import RaystowError
from ...storage.runtime.clock import Clock
from ..node_peers import NodePeers
from ..protocol.messages import EntryInfo, EntryKept, PutEntry, shortened
from ..replication.reconciler import LOOK, PartnerNodes, Reconciler
from .entry_store import EntryStore

logger = logging.getLogger(__name__)

_Done = Callable[[EntryKept], None]


class EntryReplicator(Reconciler):
    """See ``Reconciler``. ``node``: the name of this node."""

    def __init__(self, node: str, store: EntryStore, peers: NodePeers, clock: Clock) -> None:
        super().__init__()
        self._node, self._store, self._peers = node, store, peers
        self._partners = PartnerNodes(node, peers, clock)
        self._replicas: dict[str, int] = {}  # by repository
        self._waiting: dict[EntryInfo, _Done] = {}
        self._lock = threading.Lock()
        self._sent: dict[str, dict[str, str]] = {}  # node -> repository and key of entries -> why it has it not, or an empty text
        self._memories: dict[str, str] = {}  # node -> name of its memory
        self._unsure = self._freed = False

    def want(self, repository: str, replicas: int) -> None:
        """Copy the entries of a repository to so many other nodes."""
        self._replicas = {**self._replicas, repository: replicas}
        self._woken.set()

    def submit(self, info: EntryInfo, done: _Done) -> None:
        """Copy a new entry; ``done`` is called when it has its copies, or there is no node for more. It is a problem if all
        partners refuse the entry."""
        with self._lock:
            self._waiting[info] = done
        self._woken.set()

    def wake(self) -> None:
        """Look for entries without copies, and ask partners again what they have: they may have been restarted."""
        self._unsure = True
        super().wake()

    def freed(self) -> None:
        """Send entries again that partners have refused: a version is durable, so that they need less memory."""
        self._freed = True
        super().wake()

    def step(self) -> float:
        """Send one entry; the seconds after which to look again, if nothing changes before."""
        if self._unsure:
            self._unsure = False
            self._sent.clear()
        if self._freed:
            self._freed = False
            self._sent = {node: {key: why for key, why in sent.items() if not why} for node, sent in self._sent.items()}
        with self._lock:
            waiting = list(self._waiting)
        own = self._store.own() if any(self._replicas.values()) else []
        if own or waiting:
            self._partners.refresh(self._replicas.values())
        held = {_key(info) for info in own}
        for info in (*waiting, *reversed(own)):
            partners = self._partners_of(info)
            lacking = [node for node in partners if _key(info) not in self._sent.setdefault(node, {})]
            if lacking and _key(info) in held:
                self._push(lacking[0], info)
                return 0.0
            with self._lock:
                done = self._waiting.pop(info, None)
            if done is not None:
                needed = [_key(one) for one in self._store.needed(info)]  # a replay ends before the first one that is missing
                refusals = [why for node in partners if (why := next(filter(None, map(self._sent[node].get, needed)), ""))]
                copies = len(partners) - len(refusals)
                done(EntryKept(info.step, copies, "" if copies or not refusals else shortened(refusals[0])))
        self._sent = {node: {key: sent[key] for key in sent.keys() & held} for node, sent in self._sent.items()}
        return LOOK

    def _partners_of(self, info: EntryInfo) -> tuple[str, ...]:
        return self._partners.of(self._replicas.get(info.repository, 0))

    def _push(self, node: str, info: EntryInfo) -> None:
        sent = self._sent[node]
        try:
            answer = self._peers.put_entry(node, PutEntry(info, self._store.oldest(info), self._node))
        except RaystowError as error:
            self._partners.shun(node, error)
            self._sent.pop(node, None)
            return
        if answer.memory != self._memories.get(node):
            self._memories[node] = answer.memory
            sent.clear()
        sent[_key(info)] = ""
        if answer.problem and self._store.has(info):  # else it is not needed any more
            logger.warning("node %s keeps no copy of the entry of step %d: %s", node, info.step, answer.problem)
            sent[_key(info)] = f"node {node} keeps no copy: {answer.problem}"


def _key(info: EntryInfo) -> str:
    return f"{info.repository} {info.key}"
