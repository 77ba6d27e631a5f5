"""Serves a restoring process of this node: reads what it asks for, and hands over the memory that contains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...storage.errors import RaystowError, StoreUnavailable
from ...storage.object_store import ObjectStore
from ..protocol.messages import CachedObject, ReadCached, ReadFailed, shortened
from ..protocol.unix_channel import Connection
from .fetcher import Fetcher


def serve_reads(connection: Connection, first: ReadCached, fetcher: Fetcher, store_of: Callable[[str], ObjectStore]) -> None:
    """Answer until the process goes away. ``first``: its first request; ``store_of``: returns the store at a URI."""
    request: ReadCached | None = first
    while request is not None:
        read = Counter[str]()
        try:
            cached = fetcher.get(request, store_of(request.uri), read)
        except RaystowError as error:
            connection.send(ReadFailed(shortened(str(error)), isinstance(error, StoreUnavailable)))
        else:
            try:
                connection.send(CachedObject(read, cached.whole, cached.memory.extents), fd=cached.memory.descriptor)
            finally:
                cached.memory.close()
        received = connection.receive(ReadCached)
        request = received and received[0]
