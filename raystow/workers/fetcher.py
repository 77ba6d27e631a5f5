"""Gets stored bytes for all ranks of a node, each byte once, from the nearest place that has them.

First the memory tier, then the memory of other nodes, then the store. What comes from elsewhere stays for a while, since ranks of
one node often want the same: a rank that asks for bytes that are on their way waits for them. Nothing here is believed: whoever
decodes the bytes holds them against their digests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..storage.errors import RaystowError
from ..storage.object_store import Buffer, ObjectStore
from .memory_tier import MemoryTier
from .pack_file import PackFile, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """Spans of an object of ``size`` bytes. ``near``: nodes that may have it in memory, the nearest first."""

    repository: str
    key: str
    size: int
    spans: Sequence[Span]
    near: Sequence[str] = ()


class Peers(Protocol):
    """The other nodes' memory."""

    def read(self, node: str, repository: str, key: str, start: int, length: int) -> Buffer | None:
        """``length`` bytes of an object from ``start``; None if the node does not have it in memory. ``ClusterError`` if the node
        does not answer."""


class NoPeers:
    """There are no other nodes."""

    def read(self, node: str, repository: str, key: str, start: int, length: int) -> Buffer | None:
        return None


class Fetcher:
    """From any thread, during a ``visit``. ``budget``: bytes from elsewhere that stay meanwhile; ``read``: bytes by source."""

    def __init__(self, tier: MemoryTier, peers: Peers, *, budget: int) -> None:
        self._tier, self._peers, self._budget = tier, peers, budget
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, str], PackFile] = OrderedDict()
        self._busy: Counter[PackFile] = Counter()
        self._visitors = 0
        self.read: dict[str, int] = {"memory": 0, "peer": 0, "store": 0}

    def get(self, wanted: Wanted, store: ObjectStore, read: Counter[str] | None = None) -> int:
        """A descriptor of memory in which the spans are filled, for the caller to close. Raises what the store raises.

        ``read`` is told the bytes that this call got, by source; what others got meanwhile or before is not among them.
        """
        read = Counter() if read is None else read
        kept = self._tier.borrow(wanted.repository, wanted.key)
        if kept is not None:
            self._count(read, "memory", sum(end - start for start, end in wanted.spans))
            return kept
        file = self._take(wanted)
        try:
            file.ensure(wanted.spans, lambda start, target: self._fetch(wanted, store, read, start, target))
            return file.lend()
        finally:
            with self._lock:
                self._busy[file] -= 1
                self._make_room()

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """While someone visits, what was read from elsewhere stays; when the last one leaves it goes."""
        with self._lock:
            self._visitors += 1
        try:
            yield
        finally:
            with self._lock:
                self._visitors -= 1
                while self._files and not self._visitors:
                    self._files.popitem()[1].close()

    def _fetch(self, wanted: Wanted, store: ObjectStore, read: Counter[str], start: int, target: memoryview) -> None:
        for node in wanted.near:
            try:
                data = self._peers.read(node, wanted.repository, wanted.key, start, target.nbytes)
            except RaystowError as error:
                logger.warning("%s is not read from the memory of another node: %s", wanted.key, error)
                continue
            if data is not None and memoryview(data).nbytes == target.nbytes:
                target[:] = memoryview(data).cast("B")
                self._count(read, "peer", target.nbytes)
                return
        store.get_range_into(wanted.key, start, target)
        self._count(read, "store", target.nbytes)

    def _take(self, wanted: Wanted) -> PackFile:
        with self._lock:
            where = wanted.repository, wanted.key
            file = self._files.pop(where, None)
            if file is None or file.size != wanted.size:
                file = PackFile(wanted.size)
            self._files[where] = file  # the newest
            self._busy[file] += 1
            return file

    def _make_room(self) -> None:
        """Let go of what was wanted longest ago and is not being filled."""
        filled = {where: file.filled for where, file in self._files.items()}
        excess = sum(filled.values()) - self._budget
        for where, nbytes in filled.items():
            if excess > 0 and not self._busy[self._files[where]]:
                self._files.pop(where).close()
                excess -= nbytes
        self._busy += Counter()  # forgets those at zero

    def _count(self, read: Counter[str], source: str, nbytes: int) -> None:
        with self._lock:
            self.read[source] += nbytes
            read[source] += nbytes
