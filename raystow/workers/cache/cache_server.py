"""Serves a restoring process of this node: reads what it asks for, and hands over the memory that contains it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ...storage.errors import ClusterError, RaystowError, StoreUnavailable
from ...storage.object_store import ObjectStore
from ...storage.stores.settings import StoreAddress
from ..protocol.messages import Acknowledged, CachedObject, ReadCached, ReadFailed, shortened
from ..protocol.unix_channel import Connection
from .fetcher import Fetcher
from .lent_memory import LentMemory

_Read = tuple[LentMemory, bool]


def serve_reads(
    connection: Connection,
    first: ReadCached,
    fetcher: Fetcher,
    store_of: Callable[[StoreAddress], ObjectStore],
    *,
    pending_after: float = 5.0,
    lease: float = 60.0,
) -> None:
    """Answer until the process goes away. ``first``: its first request; ``store_of``: returns a store. ``pending_after``: seconds
    after which the process gets the answer that its bytes are still being read.

    Slots of a ring stay in use until the process goes away, or asks for nothing for ``lease`` seconds: it may be frozen, and a
    training may need them. If they are filled while it reads, it finds bytes without their digest, and reads these from the
    store.
    """
    request: ReadCached | None = first
    with ThreadPoolExecutor(1, "raystow-read") as reader, contextlib.ExitStack() as uses:
        while request is not None:
            read = Counter[str]()
            fetched: Future[_Read] | None = None
            try:
                found = fetcher.kept(request, read)
                if found is None:
                    fetched = reader.submit(fetcher.get, request, store_of(request.store), read)
                    while not wait([fetched], pending_after).done:
                        with contextlib.suppress(ClusterError):  # the answer cannot be sent either
                            connection.send(Acknowledged())
                    found = fetched.result()
            except RaystowError as error:
                connection.send(ReadFailed(shortened(str(error)), isinstance(error, StoreUnavailable)))
            else:
                _send(connection, read, *found, uses)
            finally:
                fetched = found = None  # an error in it keeps the memory that was to be filled
            if not connection.arrives(lease):
                uses.close()
            received = connection.receive(ReadCached)
            request = received and received[0]


def _send(connection: Connection, read: Counter[str], memory: LentMemory, whole: bool, uses: contextlib.ExitStack) -> None:
    """Send memory, and close it; ``uses`` then ends the use of its slots."""
    if memory.end is not None:
        uses.callback(memory.end)
    try:
        connection.send(CachedObject(read, whole, memory.extents, memory.others), fd=memory.descriptor)
    finally:
        os.close(memory.descriptor)
