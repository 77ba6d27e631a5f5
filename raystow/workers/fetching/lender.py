"""A conversation with a process of this node that restores: it says what it wants, and gets memory in which that lies."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

from ...storage.errors import RaystowError, StoreUnavailable
from ...storage.object_store import ObjectStore
from ..ipc.wire import Connection, Message
from .fetcher import Fetcher, Wanted

logger = logging.getLogger(__name__)


def lend(connection: Connection, first: Message, fetcher: Fetcher, store_of: Callable[[str], ObjectStore]) -> None:
    """Answer until the other side goes away. ``first``: its first message; ``store_of``: the store at a URI."""
    message: Message | None = first
    while message is not None:
        try:
            wanted = Wanted(
                repository=message["repository"],
                key=message["key"],
                size=message["size"],
                spans=[(start, end) for start, end in message["spans"]],
                near=message["near"],
                round=message["round"],
                desk=message["desk"],
            )
            read = Counter[str]()
            lent = fetcher.get(wanted, store_of(message["uri"]), read)
        except RaystowError as error:
            connection.send({"error": str(error), "store_is_down": isinstance(error, StoreUnavailable)})
        else:
            try:
                connection.send({"read": read, "whole": lent.whole}, fd=lent.descriptor)
            finally:
                os.close(lent.descriptor)
        received = connection.receive()
        message = received and received[0]
