"""A store for reading, through the memory of this node's worker: what any rank of the node has read is there for all of them."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...storage.errors import ClusterError, StoreUnavailable
from ...storage.log import about, whose
from ...storage.object_store import Buffer, ObjectStore
from ..ipc.wire import Connection

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_HELD = 32  # objects of which the memory is held: what the node worker lets go of should not stay for long


@dataclass(frozen=True)
class Place:
    """The size of an object in bytes, the nodes that may have it in memory, the nearest first; ``round`` and ``desk`` as in
    ``fetcher.Wanted``."""

    size: int
    near: Sequence[str] = ()
    round: str = ""
    desk: str = ""


class Borrowing:
    """An ``ObjectStore`` for reading, from any thread. Objects that have a ``place`` are mapped from the node worker at
    ``address``, those of ``given`` are known already; all others, and all if the node worker fails, are read from the store. So
    is what is asked for a second time: the first was wrong. Objects that the node worker has whole are asked for once. ``read``:
    bytes by where they came from, without what another rank of the node had asked for before."""

    def __init__(self, store: ObjectStore, address: str, repository: str) -> None:
        self._store, self._address, self._repository = store, address, repository
        self.place: Callable[[str], Place | None] = lambda key: None
        self.given: Mapping[str, bytes] = {}
        self.read = Counter[str]()
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._answered = set[tuple[str, int, int]]()
        self._whole = dict[str, int]()  # key -> descriptor
        self._mapped: OrderedDict[str, tuple[int, mmap.mmap]] = OrderedDict()  # key -> inode and mapping

    @property
    def uri(self) -> str:
        """That of the store."""
        return self._store.uri

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """As the protocol says."""
        if key in self.given:
            return self.given[key]
        place = self.place(key)
        if place is None or place.size > max_bytes:
            return self._store.get(key, max_bytes=max_bytes)
        return bytes(self.get_range(key, 0, place.size))

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """As the protocol says; a view of memory that is shared, not a copy."""

        def view(place: Place, descriptor: int) -> memoryview:
            return memoryview(self._map(key, place, descriptor))[start : start + length]

        found = self._borrowed(key, start, length, view)
        return self._store.get_range(key, start, length) if found is None else found

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """As the protocol says, by a copy that the kernel makes: a mapping would come page by page, with the interpreter's lock
        held."""

        def read(place: Place, descriptor: int) -> bool:
            done = 0
            while done < target.nbytes:
                if not (got := os.preadv(descriptor, [target[done:]], start + done)):
                    raise ClusterError(f"the memory that the node worker lent ends at {start + done}", subject=self._address)
                done += got
            return True

        if self._borrowed(key, start, target.nbytes, read) is None:
            self._store.get_range_into(key, start, target)

    def close(self) -> None:
        """When no thread reads any more: end the conversations, and let go of the memory as soon as no view of it is held."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            for descriptor in self._whole.values():
                os.close(descriptor)
            self._whole.clear()
            self._mapped.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _borrowed(self, key: str, start: int, length: int, use: Callable[[Place, int], _Result]) -> _Result | None:
        """What ``use`` makes of the descriptor of an object in which so many bytes are filled; None if they must be read from the
        store."""
        place, asked = self.place(key), (key, start, length)
        if place is None or start + length > place.size or not length:
            return None
        try:
            if asked in self._answered:
                raise ClusterError("what it gave is asked for again: it must have been wrong", subject=self._address)
            self._answered.add(asked)
            held = self._whole.get(key)
            if held is None:
                return self._borrow(key, place, start, length, functools.partial(use, place))
            with self._lock:
                self.read["memory"] += length
            return use(place, held)
        except ClusterError as error:
            about(logger, repository=self.uri, **whose(key)).warning("%s is read past the node worker: %s", key, error)
            with self._lock:
                self.read["store"] += length
            return None

    def _borrow(self, key: str, place: Place, start: int, length: int, use: Callable[[int], _Result]) -> _Result:
        wanted = {
            "uri": self._store.uri,
            "repository": self._repository,
            "key": key,
            "size": place.size,
            "spans": [[start, start + length]],
            "near": list(place.near),
            "round": place.round,
            "desk": place.desk,
        }
        return self._talk(lambda connection: self._ask(connection, wanted, use))

    def _ask(self, connection: Connection, wanted: dict[str, Any], use: Callable[[int], _Result]) -> _Result:
        key = wanted["key"]
        connection.send(wanted)
        answer = connection.receive()
        if answer is None:
            raise ClusterError("the node worker ended the conversation", subject=self._address)
        message, descriptor = answer
        if descriptor is None:
            if message["store_is_down"]:  # it has tried for minutes: so would this process
                raise StoreUnavailable(f"the node worker waited for the store in vain: {message['error']}", subject=key)
            raise ClusterError(f"the node worker could not get it: {message['error']}", subject=self._address)
        held = False
        try:
            if (size := os.fstat(descriptor).st_size) < wanted["size"]:
                raise ClusterError(f"the node worker lent {size} bytes instead of {wanted['size']}", subject=self._address)
            with self._lock:
                self.read.update(message["read"])
                if message["whole"] and len(self._whole) < _HELD:
                    held = self._whole.setdefault(key, descriptor) == descriptor
            return use(descriptor)
        finally:
            if not held:
                os.close(descriptor)

    def _map(self, key: str, place: Place, descriptor: int) -> mmap.mmap:
        """One mapping for each object that was asked for lately, as long as the node worker lends the same memory."""
        inode = os.fstat(descriptor).st_ino
        with self._lock:
            known = self._mapped.get(key)
            if known is None or known[0] != inode:
                known = self._mapped[key] = inode, mmap.mmap(descriptor, place.size, prot=mmap.PROT_READ)
            self._mapped.move_to_end(key)
            if len(self._mapped) > _HELD:
                self._mapped.popitem(last=False)
            return known[1]

    def _talk(self, work: Callable[[Connection], _Result]) -> _Result:
        """With a conversation of this thread's own: another may be waiting for its answer."""
        with self._lock:
            connection = self._connections.pop() if self._connections else None
        connection = connection or Connection.connect(self._address)
        try:
            result = work(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connections.append(connection)
        return result
