"""Serves a restoring process of this node: reads what it asks for, and hands over the memory that contains it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ...storage.errors import ClusterError, RaystowError, StoreUnavailable
from ...storage.object_store import ObjectStore
from ...storage.stores.settings import StoreAddress
from ..protocol.messages import CachedObject, ReadCached, ReadFailed, ReadPending, shortened
from ..protocol.unix_channel import Connection
from .fetcher import Fetcher
from .lent_memory import LentMemory


def serve_reads(
    connection: Connection,
    first: ReadCached,
    fetcher: Fetcher,
    store_of: Callable[[StoreAddress], ObjectStore],
    *,
    pending_after: float = 5.0,
) -> None:
    """Answer until the process goes away. ``first``: its first request; ``store_of``: returns a store. ``pending_after``: seconds
    after which the process gets the answer that its bytes are still being read."""
    request: ReadCached | None = first
    with ThreadPoolExecutor(1, "raystow-read") as reader:
        while request is not None:
            read = Counter[str]()
            fetched: Future[tuple[LentMemory, bool]] | None = None
            try:
                fetched = reader.submit(fetcher.get, request, store_of(request.store), read)
                while not wait([fetched], pending_after).done:
                    with contextlib.suppress(ClusterError):  # the answer cannot be sent either
                        connection.send(ReadPending())
                memory, whole = fetched.result()
            except RaystowError as error:
                connection.send(ReadFailed(shortened(str(error)), isinstance(error, StoreUnavailable)))
            else:
                try:
                    connection.send(CachedObject(read, whole, memory.extents), fd=memory.descriptor)
                finally:
                    memory.close()
            finally:
                fetched = None  # an error in it keeps the memory that was to be filled
            received = connection.receive(ReadCached)
            request = received and received[0]
