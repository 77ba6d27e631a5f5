"""The journal as its node worker sees it: entries in memory, their copies, and the training processes that record them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec.structs import replace

from ...storage.errors import ClusterError, ProtocolError, RaystowError
from ...storage.runtime import background
from ...storage.runtime.clock import Clock
from ...storage.runtime.metrics import JOURNAL_MEMORY, RECORDED_STEP, record
from ...storage.stores.settings import StoreAddress
from ..node_peers import NodePeers
from ..protocol.messages import (
    RECORDING,
    STORE,
    AppendEntry,
    BeginEntry,
    EntryInfo,
    EntryKept,
    EntryPlace,
    FetchedEntry,
    FetchEntry,
    KeepEntry,
    OpenJournal,
    PutEntry,
    SaveBegun,
    SaveWithdrawn,
    ShareMemory,
    SlotsFilled,
    SlotsFree,
    shortened,
)
from ..protocol.unix_channel import Connection
from .entry_bytes import ArrivingEntry, SharedMemories, entry_digest
from .entry_replicator import EntryReplicator
from .entry_store import EntryStore
from .segment_writer import RepositoryEnds, SegmentWriter, read_entry

logger = logging.getLogger(__name__)

_CONNECTIONS = 8  # over which a large entry is read: one carries 2 to 4 GB/s
LEAST_SHARE = 32 << 20  # bytes over each of them
CHANGED = "it does not have its digest: its bytes were changed in memory or on their way"
_QUIET = 600.0  # seconds without an entry of a training from which on its copies are dropped for those of others
_REQUESTS = (ShareMemory, BeginEntry, AppendEntry, SlotsFilled, KeepEntry, SaveBegun, SaveWithdrawn, FetchEntry)


def no_repository(store: StoreAddress) -> RepositoryEnds:
    """Refuse to open a repository: the node has only entries in memory."""
    raise ClusterError("this node uses no store", subject=store.uri)


class NodeJournal:
    """Thread-safe. ``budget``: bytes for entries, unless a training process asks for another one. ``open_repository``: that at a
    URI."""

    def __init__(
        self,
        node: str,
        budget: int,
        peers: NodePeers,
        clock: Clock,
        *,
        open_repository: Callable[[StoreAddress], RepositoryEnds] = no_repository,
    ) -> None:
        self._node, self._budget, self._peers, self._open_repository = node, budget, peers, open_repository
        self.store, self._token = EntryStore(budget), clock.token()
        self._clock, self._heard = clock, dict[str, float]()  # repository -> when another node sent an entry of it last
        self._uris: dict[str, str] = {}  # of the repositories whose steps are recorded here, by their ids
        self._replicator = EntryReplicator(node, self.store, peers, clock)
        background.repeat("raystow-entries", self._replicator.run)

    def committed(self, repository: str, step: int) -> None:
        """Drop the entries up to the step of a version that is durable now."""
        self.store.committed(repository, step)
        self._replicator.freed()

    def serve(self, connection: Connection, opening: OpenJournal) -> None:
        """Handle the messages of a training process until it goes away."""
        self._uris[opening.repository] = opening.uri
        self.store.budget = self._budget if opening.budget is None else opening.budget
        self._replicator.want(opening.repository, opening.replicas)
        segments, shared, arriving = None, SharedMemories(), ArrivingEntry(0)
        with contextlib.ExitStack() as ended:
            ended.enter_context(self.store.recording(opening.repository))
            if opening.durable_every:
                segments = SegmentWriter(self.store, opening, functools.partial(self._open_repository, opening.store))
                background.repeat("raystow-segments", segments.run)
                ended.callback(segments.close)
            while (received := connection.receive(*_REQUESTS)) is not None:
                message, descriptor = received
                match message:
                    case ShareMemory(number, size) if descriptor is not None:
                        shared.share(number, size, descriptor)
                    case BeginEntry(info, most):
                        shared.keep_only(RECORDING)  # fetched entries are gone
                        arriving = ArrivingEntry(most, functools.partial(self._refused, info))
                    case AppendEntry(spans):
                        arriving.append(shared.parts(RECORDING, spans))
                    case SlotsFilled(slots):
                        connection.send(SlotsFree(slots))
                    case KeepEntry(info):
                        kept = self._keep(connection, info, arriving)
                        if kept is not None and segments is not None:
                            segments.kept(kept)
                        arriving = ArrivingEntry(0)
                    case SaveBegun(step, generation):
                        self.store.save_begun(opening.repository, step, generation)
                    case SaveWithdrawn(step):
                        self.store.save_failed(opening.repository, step)
                    case FetchEntry(place, number):
                        connection.send(FetchedEntry(self._fetch(opening.store, place, shared, number)))

    def accept(self, put: PutEntry) -> EntryKept:
        """Keep a copy of another node's entry, which is read from there. ``ClusterError`` if that does not answer, or other bytes
        come than the entry has."""
        info, now = put.info, self._clock.monotonic()
        self._heard[info.repository] = now
        live = {repository for repository, at in list(self._heard.items()) if at > now - _QUIET}
        self.store.drop_before(info, put.oldest)
        if self.store.has(info):
            return EntryKept(info.step, 1, memory=self._memory)
        if problem := self.store.problem(info, live):  # before its bytes are read
            return EntryKept(info.step, 0, shortened(problem), self._memory)
        content = np.empty(info.size, np.uint8).data
        if not self._read(put.holder, info, content):
            return EntryKept(info.step, 0, f"node {put.holder} has dropped it", self._memory)
        if entry_digest(content) != info.digest:
            raise ClusterError(CHANGED, subject=f"entry of step {info.step} of node {put.holder}")
        problem = self.store.add(info, content, own=False, live=live)
        return EntryKept(info.step, int(not problem), shortened(problem), self._memory)

    @property
    def _memory(self) -> str:
        """Another name after copies were dropped that the nodes that sent them rely on: they send all again."""
        return f"{self._token}-{self.store.evictions}"

    def named(self, repository: str, key: str) -> memoryview | None:
        """Return the bytes of the entry with a key; None if it is not here."""
        return self.store.named(repository, key)

    def measure(self) -> None:
        """Set the gauges."""
        record(JOURNAL_MEMORY, self.store.used, node=self._node)
        for repository, uri in list(self._uris.items()):
            if (step := self.store.newest(repository)) is not None:
                record(RECORDED_STEP, step, repository=uri, node=self._node)

    def close(self) -> None:
        """Let go of everything."""
        self._replicator.close()
        self.store.close()

    def _refused(self, begun: EntryInfo, size: int) -> str:
        return self.store.problem(replace(begun, size=size))

    def _keep(self, connection: Connection, info: EntryInfo, arrived: ArrivingEntry) -> EntryInfo | None:
        """Keep an entry of this node, from now on with its digest. Its slots in the ring are free by now."""
        if arrived.size != info.size:
            raise ProtocolError(f"{arrived.size} bytes have arrived of an entry of {info.size}")
        problem = arrived.problem
        if not problem:
            content = arrived.content()
            info = replace(info, digest=entry_digest(content))
            problem = self.store.add(info, content, own=True)
        if problem:
            connection.send(EntryKept(info.step, 0, shortened(problem)))
            return None
        self._replicator.submit(info, connection.post)  # its thread serves other processes, too, and this one may not read
        return info

    def _fetch(self, store: StoreAddress, place: EntryPlace, shared: SharedMemories, number: int) -> str:
        """Put an entry from here, another node or the store into shared memory; return why that failed, or an empty text. It
        stays here if it fits, so that it has as many copies as a new one."""
        info = place.info
        try:
            content = self._found(store, place)
            self.store.add(info, content, own=True)
            shared.put(number, content)
        except RaystowError as error:
            return shortened(str(error))
        finally:
            self._replicator.wake()
        return ""

    def _read(self, node: str, info: EntryInfo, target: memoryview) -> bool:
        """Fill ``target`` with an entry of another node, over several connections if it is large; return whether it is there."""
        share = max(LEAST_SHARE, -(-target.nbytes // _CONNECTIONS))
        parts = [(start, target[start : start + share]) for start in range(0, target.nbytes, share)]

        def read(start: int, part: memoryview) -> bool:
            return self._peers.read(node, info.repository, info.key, start, part)

        if len(parts) == 1:
            return read(*parts[0])
        with ThreadPoolExecutor(len(parts), "raystow-entry") as pool:
            return all([*pool.map(read, *zip(*parts, strict=True))])

    def _found(self, store: StoreAddress, place: EntryPlace) -> memoryview:
        """Return an entry from here, a copy from another node or, if none has it, from the store: what has its digest."""
        info, reasons = place.info, list[str]()
        here = self.store.view(info)
        if here is not None and entry_digest(here) == info.digest:
            return here
        content = np.empty(info.size, np.uint8).data
        for node in place.nodes:
            if node in (self._node, STORE):
                continue
            try:
                if not self._read(node, info, content):
                    reasons.append(f"node {node} has dropped it")
                elif entry_digest(content) == info.digest:
                    return content
                else:
                    reasons.append(f"node {node}: {CHANGED}")
                    logger.warning("the entry of step %d is not read from node %s: %s", info.step, node, CHANGED)
            except ClusterError as error:
                reasons.append(str(error))
        if place.stored is None:
            raise ClusterError(f"no node has it: {'; '.join(reasons)}", subject=f"entry of step {info.step}")
        read_entry(self._open_repository(store)[0], place, content)
        return content
