"""Reads stored bytes for all ranks of a node, each byte once, from the nearest place that has them.

The memory tier comes first, then the memory of other nodes, then the store. When several nodes restore together, one of them
reads each byte from the store and sends it to the others. What was read from other nodes or the store is kept while this node
restores, since other ranks and nodes often need it too; a request for bytes that are being read waits for them. Decoders check
everything against its digest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from ...storage.errors import DeadlineExceeded, RaystowError
from ...storage.log import about, whose
from ...storage.object_store import ObjectStore
from ..node_peers import NodePeers
from ..protocol.messages import Claim, ReadCached, Span
from .lent_memory import LentMemory
from .pack_file import PackFile
from .read_dedup import ReadClaims
from .tier import MemoryTier

logger = logging.getLogger(__name__)


class Fetcher:
    """Thread-safe; use it within a ``visit``. ``node``: this node. ``budget``: bytes read from elsewhere that are kept."""

    def __init__(self, tier: MemoryTier, peers: NodePeers, *, budget: int, node: str = "") -> None:
        self._tier, self._peers, self._budget, self._node = tier, peers, budget, node
        self.claims = ReadClaims()
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, str], PackFile] = OrderedDict()
        self._filled: Counter[tuple[str, str]] = Counter()  # bytes of each when it was last used
        self._busy: Counter[PackFile] = Counter()
        self._claimed = set[tuple[str, str]]()  # files that other nodes rely on: this node has claimed a part
        self._visitors = 0

    def get(self, request: ReadCached, store: ObjectStore, read: Counter[str]) -> tuple[LentMemory, bool]:
        """Return memory in which the spans are filled, for the caller to close, and whether it has the whole object. Raises what
        the store raises.

        The bytes that this call reads are added to ``read``, by source; "instead" is the store, because the node that was to read
        them did not send them. What other threads have read is not counted.
        """
        if (kept := self.kept(request, read)) is not None:
            return kept
        with self._file(request) as file:
            file.ensure(request.spans, lambda start, target: self._fetch(request, store, read, start, target))
            return LentMemory(file.lend()), False

    def kept(self, request: ReadCached, read: Counter[str]) -> tuple[LentMemory, bool] | None:
        """What ``get`` returns, if the memory tier has the object; it is not waited for."""
        memory = self._tier.lend_version(request.repository, request.key)
        if memory is None:
            return None
        read["memory"] += sum(end - start for start, end in request.spans)
        return memory, True

    def lend(self, repository: str, key: str, span: Span, seconds: float) -> LentMemory | None:
        """Return memory in which a span is filled, for another node; None if it is not here. Waits while it is being fetched:
        ``DeadlineExceeded`` if that takes longer than ``seconds``."""
        kept = self._tier.lend(repository, key)
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
                raise DeadlineExceeded(f"bytes {span} are being read", subject=key)
            return LentMemory(file.lend()) if arrived else None
        finally:
            self._leave((repository, key), file)

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Keep what was read from elsewhere for the block; it is dropped when the last of the visits ends."""
        with self._lock:
            self._visitors += 1
        try:
            yield
        finally:
            with self._lock:
                self._visitors -= 1
                self._make_room()

    def _fetch(self, request: ReadCached, store: ObjectStore, read: Counter[str], start: int, target: memoryview) -> None:
        for node in request.nearby:
            if self._from_node(node, request, start, target):
                read["peer"] += target.nbytes
                return
        span = start, start + target.nbytes
        for first, end, node in self._claim(request, span):
            part = target[first - start : end - start]
            if node == self._node:
                self._claimed.add((request.repository, request.key))
                store.get_range_into(request.key, first, part)
                read["store"] += part.nbytes
            elif self._from_node(node, request, first, part):
                read["peer"] += part.nbytes
            else:
                fields = (request.key, first, end, node)
                log = about(logger, **whose(request.key))
                log.warning("%s, bytes %d to %d: read from the store, since node %s did not send them", *fields)
                self._claim(request, (first, end), lost=[node])  # so that the next one asks here
                store.get_range_into(request.key, first, part)
                read["instead"] += part.nbytes

    def _from_node(self, node: str, request: ReadCached, start: int, target: memoryview) -> bool:
        try:
            return self._peers.read(node, request.repository, request.key, start, target)
        except RaystowError as error:
            log = about(logger, **whose(request.key))
            log.warning("%s is not read from the memory of another node: %s", request.key, error)
            return False

    def _claim(self, request: ReadCached, span: Span, *, lost: Sequence[str] = ()) -> list[Claim]:
        """Return which node reads which part of the span from the store: this node all of it, if the owner does not answer."""
        if request.owner == self._node:
            return self.claims.claim(request.round, request.key, span, self._node, lost=lost)
        if request.owner:
            try:
                return self._peers.claim(request.owner, request.round, request.key, span, self._node, lost=lost)
            except RaystowError as error:
                log = about(logger, **whose(request.key))
                log.warning("%s may be read from the store more than once: %s", request.key, error)
        return [(*span, self._node)]

    @contextlib.contextmanager
    def _file(self, request: ReadCached) -> Iterator[PackFile]:
        where = request.repository, request.key
        with self._lock:
            file = self._files.pop(where, None)
            if file is None or file.size != request.size:
                file = PackFile(request.size)
            self._files[where] = file  # the most recently used
            self._busy[file] += 1
        try:
            yield file
        finally:
            self._leave(where, file)

    def _leave(self, where: tuple[str, str], file: PackFile) -> None:
        with self._lock:
            self._busy[file] -= 1
            if self._files.get(where) is file:
                self._filled[where] = file.filled
            self._make_room()

    def _make_room(self) -> None:
        """Drop files that are not in use until the rest fits, or all of them without a visit: first those that other nodes will
        not ask for, the least recently requested one first."""
        self._busy += Counter()  # forgets those at zero
        excess = self._filled.total() - (self._budget if self._visitors else -1)
        if excess <= 0:
            return
        for where in sorted(self._files, key=lambda where: where in self._claimed):
            if excess > 0 and not self._busy[self._files[where]]:
                self._files.pop(where).close()
                self._claimed.discard(where)
                excess -= self._filled.pop(where)
