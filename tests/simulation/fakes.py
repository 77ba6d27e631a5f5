"""What the code under test finds in the place of stores that are opened by address, of threads and of its log."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator
from unittest import mock

from raystow.storage import leases, reader, repository, scan
from raystow.storage.retention import plan, rewrite

from . import clocks
from .cluster import Cluster


@contextlib.contextmanager
def fakes(cluster: Cluster) -> Iterator[None]:
    """For as long as this world is played."""
    threading = types.SimpleNamespace(Event=clocks.Event, Thread=clocks.Thread)
    logger = logging.getLogger("raystow")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    with (
        mock.patch.object(repository, "open_store", cluster.store_here),
        mock.patch.object(plan, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(reader, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(rewrite, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(scan, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(leases, "threading", threading),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)
