"""Replace stores that are opened by address, threads, their pauses and the log of the code under test."""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Iterator
from unittest import mock

from raystow.orchestrator.restore import version_cache
from raystow.storage import repository
from raystow.storage.checks import scan
from raystow.storage.commit import leases
from raystow.storage.retention import plan, rewrite
from raystow.storage.runtime import background
from raystow.storage.versions import reader

from . import clocks
from .cluster import Cluster


@contextlib.contextmanager
def fakes(cluster: Cluster) -> Iterator[None]:
    """Replace them while this world is played; check that no real thread was started."""
    simulated = types.SimpleNamespace(Event=clocks.Event, Thread=clocks.Thread)
    real = set(threading.enumerate())
    logger = logging.getLogger("raystow")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    with (
        mock.patch.object(repository, "open_store", cluster.store_here),
        mock.patch.object(plan, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(reader, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(rewrite, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(version_cache, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(scan, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(background, "threading", simulated),
        mock.patch.object(background, "SYSTEM", clocks.ThreadClock()),
        mock.patch.object(leases, "threading", simulated),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)
    begun = [thread.name for thread in threading.enumerate() if thread not in real and thread.name.startswith("raystow-")]
    assert not begun, f"real threads have begun: {begun}"
