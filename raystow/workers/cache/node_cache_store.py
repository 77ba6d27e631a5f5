"""A store for reading, through the memory of this node's worker: all ranks of the node share what one of them has read."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...storage.errors import ClusterError, StoreUnavailable
from ...storage.log import about, whose
from ...storage.object_store import Buffer, ObjectStore
from ...storage.stores.settings import place_of
from ..protocol.messages import Acknowledged, CachedObject, ReadCached, ReadFailed
from ..protocol.unix_channel import Connection
from .lent_memory import LentMemory

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
HELD = 32  # objects whose memory stays open or mapped, the last used: what the node worker releases should be freed soon


@dataclass(frozen=True)
class ObjectLocation:
    """The size of an object in bytes, and where its bytes may be: see ``messages.ReadCached``."""

    size: int
    nearby: tuple[str, ...] = ()
    round: str = ""
    owner: str = ""


class BorrowedMemory(LentMemory):
    """Memory that this process has received. It is closed with the last reference, since several threads may be reading it."""

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class _BorrowedPart(LentMemory):
    """Another object in memory that this process has received."""

    memory: LentMemory | None = None


class NodeCacheStore:
    """A thread-safe ``ObjectStore`` for reading.

    Objects with a ``location`` are mapped from the node worker at ``address``; those in ``given`` are known. All others are read
    from the store, and so is everything if the node worker fails, and whatever is requested twice: the first answer was wrong.
    ``read``: bytes by source, without those that another rank of the node had requested before.

    Args:
        patience: Seconds after which a node worker is frozen that has said neither the answer nor that it is reading.
    """

    def __init__(self, store: ObjectStore, address: str, repository: str, *, patience: float = 15.0) -> None:
        self._patience = patience
        self._store, self._address, self._repository = store, address, repository
        self.location: Callable[[str], ObjectLocation | None] = lambda key: None
        self.given: Mapping[str, bytes] = {}
        self.read = Counter[str]()
        self._frozen = False  # the node worker: every request would wait as long as the one that was not answered
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._answered = set[tuple[str, int, int]]()
        self._whole: OrderedDict[str, LentMemory] = OrderedDict()
        self._together: dict[str, LentMemory] = {}  # objects whose places came with one answer
        self._first = threading.Lock()  # held until the first answer has come: it may be the only one that is needed
        self._asked = False
        self._mapped: OrderedDict[str, tuple[int, mmap.mmap]] = OrderedDict()  # key -> inode and mapping

    @property
    def uri(self) -> str:
        """That of the store."""
        return self._store.uri

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See ``ObjectStore``."""
        if key in self.given:
            return self.given[key]
        location = self.location(key)
        if location is None or location.size > max_bytes:
            found = self._store.get(key, max_bytes=max_bytes)
            with self._lock:
                self.read["store"] += len(found)
            return found
        return bytes(self.get_range(key, 0, location.size))

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """See ``ObjectStore``; returns a view of shared memory, not a copy, unless the object is in parts."""

        def view(location: ObjectLocation, memory: LentMemory) -> Buffer:
            if not memory.extents:
                return memoryview(self._map(key, location, memory.descriptor))[start : start + length]
            self._read(memory, start, memoryview(copy := bytearray(length)))
            return copy

        found = self._through_worker(key, start, length, view)
        return self._store.get_range(key, start, length) if found is None else found

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """See ``ObjectStore``. The kernel copies: page faults of a mapping would hold the interpreter's lock."""

        def read(location: ObjectLocation, memory: LentMemory) -> bool:
            self._read(memory, start, target)
            return True

        if self._through_worker(key, start, target.nbytes, read) is None:
            self._store.get_range_into(key, start, target)

    def close(self) -> None:
        """Close the connections; memory is freed when no view of it is left. No thread may be reading."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._whole.clear()
            self._together.clear()
            self._mapped.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _read(self, memory: LentMemory, start: int, target: memoryview) -> None:
        """Fill ``target`` with an object's bytes from ``start``."""
        done = 0
        for at, size in memory.spans(start, target.nbytes):
            end = done + size
            while done < end:
                if not (got := os.preadv(memory.descriptor, [target[done:end]], at)):
                    raise ClusterError(f"the memory that the node worker lent ends at {at}", subject=self._address)
                done, at = done + got, at + got

    def _through_worker(
        self, key: str, start: int, length: int, use: Callable[[ObjectLocation, LentMemory], _Result]
    ) -> _Result | None:
        """Return ``use`` of memory that contains these bytes; None if they must be read from the store."""
        location, asked = self.location(key), (key, start, length)
        silent = self._frozen and key not in self._whole and key not in self._together
        if location is None or silent or start + length > location.size or not length:
            with self._lock:
                self.read["store"] += length
            return None
        try:
            if asked in self._answered:
                raise ClusterError("it is requested again, so the first answer must have been wrong", subject=self._address)
            self._answered.add(asked)
            with contextlib.nullcontext() if self._asked else self._first:
                memory = self._known(key, length) or self._request(key, location, start, length)
            return use(location, memory)
        except ClusterError as error:
            self._frozen = self._frozen or isinstance(error.__cause__, TimeoutError)
            about(logger, repository=self.uri, **whose(key)).warning("%s is read without the node worker: %s", key, error)
            with self._lock:
                self.read["store"] += length
            return None

    def _known(self, key: str, length: int) -> LentMemory | None:
        """Return the memory of an object that came with an earlier answer; count the bytes that are read there."""
        with self._lock:
            if (memory := self._together.get(key)) is None and (memory := self._whole.get(key)) is not None:
                self._whole.move_to_end(key)
            if memory is not None:
                self.read["memory"] += length
        return memory

    def _request(self, key: str, location: ObjectLocation, start: int, length: int) -> BorrowedMemory:
        """Ask the node worker for memory with these bytes, and keep it open if it has the whole object."""
        request = ReadCached(
            repository=self._repository,
            key=key,
            size=location.size,
            spans=((start, start + length),),
            nearby=location.nearby,
            round=location.round,
            owner=location.owner,
            uri=self._store.uri,
            place=place_of(self._store),
        )
        try:
            answer, descriptor = self._ask(request)
        finally:
            self._asked = True
        memory = BorrowedMemory(descriptor, answer.extents)
        if not memory.extents and (size := os.fstat(descriptor).st_size) < request.size:
            raise ClusterError(f"the node worker lent {size} bytes instead of {request.size}", subject=self._address)
        with self._lock:
            self.read.update(answer.read)
            for other, extents in answer.others.items():
                self._together[other] = _BorrowedPart(descriptor, extents, memory=memory)
            if answer.others:
                self._together[key] = memory
            elif answer.whole:
                self._whole[key] = memory
                if len(self._whole) > HELD:
                    self._whole.popitem(last=False)
        return memory

    def _ask(self, request: ReadCached) -> tuple[CachedObject, int]:
        """Return the answer and its descriptor, over a connection that no other thread uses meanwhile."""
        with self._lock:
            connection = self._connections.pop() if self._connections else None
        connection = connection or Connection.connect(self._address)
        try:
            connection.send(request)
            received: tuple[CachedObject | ReadFailed | Acknowledged, int | None] | None
            answer: CachedObject | ReadFailed | Acknowledged = Acknowledged()
            while isinstance(answer, Acknowledged):
                received = connection.receive(CachedObject, ReadFailed, Acknowledged, timeout=self._patience)
                if received is None:
                    raise ClusterError("the node worker closed the connection", subject=self._address)
                answer, descriptor = received
            if isinstance(answer, ReadFailed):
                if answer.store_unavailable:  # it has tried for minutes: so would this process
                    raise StoreUnavailable(
                        f"the node worker could not read it from the store: {answer.reason}", subject=request.key
                    )
                raise ClusterError(f"the node worker could not read it: {answer.reason}", subject=self._address)
            if descriptor is None:
                raise ClusterError("the node worker's descriptor did not arrive", subject=self._address)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connections.append(connection)
        return answer, descriptor

    def _map(self, key: str, location: ObjectLocation, descriptor: int) -> mmap.mmap:
        """Return a mapping of the object, the same as before if the node worker lends the same memory."""
        inode = os.fstat(descriptor).st_ino
        with self._lock:
            known = self._mapped.get(key)
            if known is None or known[0] != inode:
                known = self._mapped[key] = inode, mmap.mmap(descriptor, location.size, prot=mmap.PROT_READ)
            self._mapped.move_to_end(key)
            if len(self._mapped) > HELD:
                self._mapped.popitem(last=False)
            return known[1]
