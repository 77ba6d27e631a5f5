"""Gets stored bytes for all ranks of a node, each byte once, from the nearest place that has them.

First the memory tier, then the memory of other nodes, then the store; and of what several nodes read from the store when they
restore together, each byte is read by one of them and sent on. What comes from elsewhere stays for a while, since ranks of
one node, and other nodes, often want the same: who asks for bytes that are on their way waits for them. Nothing here is believed:
whoever decodes the bytes holds them against their digests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...storage.errors import DeadlineExceeded, RaystowError
from ...storage.log import about, whose
from ...storage.object_store import ObjectStore
from ..memory.memory_tier import MemoryTier
from ..memory.pack_file import PackFile, Span
from .claims import Claim, Claims

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """Spans of an object of ``size`` bytes. ``near``: nodes that may have it in memory, the nearest first. ``desk``: the node at
    which those that restore together, in this ``round``, claim what they read of the object; empty if there is only one."""

    repository: str
    key: str
    size: int
    spans: Sequence[Span]
    near: Sequence[str] = ()
    round: str = ""
    desk: str = ""


class Lent(NamedTuple):
    """A descriptor of memory, for the borrower to close. ``whole``: all of the object is there, not only what was asked for."""

    descriptor: int
    whole: bool


class Others(Protocol):
    """The other nodes' workers; see ``peers.Peers``. ``ClusterError`` if a node does not answer."""

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with an object's bytes from ``start``; whether the node has them in memory, or had them soon."""

    def claim(self, desk: str, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """See ``Claims.claim``: at another node's desk."""


class Nowhere:
    """There are no other nodes."""

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        return False

    def claim(self, desk: str, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        return [(*span, node)]


class Fetcher:
    """From any thread, during a ``visit``. ``node``: this one. ``budget``: bytes from elsewhere that stay meanwhile.

    ``read``: bytes by source; "instead" is the store, asked because the node that was to read them did not send them.
    """

    def __init__(self, tier: MemoryTier, others: Others, *, budget: int, node: str = "") -> None:
        self._tier, self._others, self._budget, self._node = tier, others, budget, node
        self.claims = Claims()
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, str], PackFile] = OrderedDict()
        self._busy: Counter[PackFile] = Counter()
        self._claimed = set[tuple[str, str]]()  # files of which other nodes count on a part
        self._visitors = 0
        self.read: dict[str, int] = {"memory": 0, "peer": 0, "store": 0, "instead": 0}

    def get(self, wanted: Wanted, store: ObjectStore, read: Counter[str] | None = None) -> Lent:
        """Memory in which the spans are filled. Raises what the store raises.

        ``read`` is told the bytes that this call got, by source; what others got meanwhile or before is not among them.
        """
        read = Counter() if read is None else read
        kept = self._tier.borrow(wanted.repository, wanted.key)
        if kept is not None:
            self._count(read, "memory", sum(end - start for start, end in wanted.spans))
            return Lent(kept, whole=True)
        with self._file(wanted) as file:
            file.ensure(wanted.spans, lambda start, target: self._fetch(wanted, store, read, start, target))
            return Lent(file.lend(), whole=False)

    def lend(self, repository: str, key: str, span: Span, seconds: float) -> int | None:
        """A descriptor of memory in which a span is filled, for another node; None if it is not here. What is being fetched is
        waited for: ``DeadlineExceeded`` if that takes longer than ``seconds``."""
        kept = self._tier.borrow(repository, key)
        if kept is not None:
            return kept
        with self._lock:
            file = self._files.get((repository, key))
            if file is None:
                return None
            self._busy[file] += 1
        try:
            arrived = file.arrives(span, seconds)
            if arrived is None:
                raise DeadlineExceeded(f"bytes {span} are on their way", subject=key)
            return file.lend() if arrived else None
        finally:
            self._leave(file)

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
                self._make_room()

    def _fetch(self, wanted: Wanted, store: ObjectStore, read: Counter[str], start: int, target: memoryview) -> None:
        for node in wanted.near:
            if self._from_node(node, wanted, start, target):
                self._count(read, "peer", target.nbytes)
                return
        span = start, start + target.nbytes
        for first, end, node in self._claim(wanted, span):
            part = target[first - start : end - start]
            if node == self._node:
                self._claimed.add((wanted.repository, wanted.key))
                store.get_range_into(wanted.key, first, part)
                self._count(read, "store", part.nbytes)
            elif self._from_node(node, wanted, first, part):
                self._count(read, "peer", part.nbytes)
            else:
                told = (wanted.key, first, end, node)
                log = about(logger, **whose(wanted.key))
                log.warning("%s, bytes %d to %d: read from the store, since node %s did not send them", *told)
                self._claim(wanted, (first, end), lost=[node])  # so that the next one asks here
                store.get_range_into(wanted.key, first, part)
                self._count(read, "instead", part.nbytes)

    def _from_node(self, node: str, wanted: Wanted, start: int, target: memoryview) -> bool:
        try:
            return self._others.read(node, wanted.repository, wanted.key, start, target)
        except RaystowError as error:
            log = about(logger, **whose(wanted.key))
            log.warning("%s is not read from the memory of another node: %s", wanted.key, error)
            return False

    def _claim(self, wanted: Wanted, span: Span, *, lost: Sequence[str] = ()) -> list[Claim]:
        """What this node is to read from the store, and what others read; all of it, if nobody can be asked."""
        if wanted.desk == self._node:
            return self.claims.claim(wanted.round, wanted.key, span, self._node, lost=lost)
        if wanted.desk:
            try:
                return self._others.claim(wanted.desk, wanted.round, wanted.key, span, self._node, lost=lost)
            except RaystowError as error:
                log = about(logger, **whose(wanted.key))
                log.warning("%s may be read from the store more than once: %s", wanted.key, error)
        return [(*span, self._node)]

    @contextlib.contextmanager
    def _file(self, wanted: Wanted) -> Iterator[PackFile]:
        with self._lock:
            where = wanted.repository, wanted.key
            file = self._files.pop(where, None)
            if file is None or file.size != wanted.size:
                file = PackFile(wanted.size)
            self._files[where] = file  # the newest
            self._busy[file] += 1
        try:
            yield file
        finally:
            self._leave(file)

    def _leave(self, file: PackFile) -> None:
        with self._lock:
            self._busy[file] -= 1
            self._make_room()

    def _make_room(self) -> None:
        """Let go of what does not fit, and without visitors of everything, unless somebody is at it: first of what other nodes
        will not ask for, and of that first what was wanted longest ago."""
        self._busy += Counter()  # forgets those at zero
        filled = {where: file.filled for where, file in self._files.items()}
        excess = sum(filled.values()) - (self._budget if self._visitors else -1)
        for where in sorted(filled, key=lambda where: where in self._claimed):
            if excess > 0 and not self._busy[self._files[where]]:
                self._files.pop(where).close()
                self._claimed.discard(where)
                excess -= filled[where]

    def _count(self, read: Counter[str], source: str, nbytes: int) -> None:
        with self._lock:
            self.read[source] += nbytes
            read[source] += nbytes
