"""What the code under test finds in the place of stores that are opened by address, of threads and of its log."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator
from unittest import mock

from raystow.storage import leases, reader, repository, survey
from raystow.storage.retention import rewriting

from . import clocks
from .world import World


@contextlib.contextmanager
def stand_ins(world: World) -> Iterator[None]:
    """For as long as this world is played."""
    threading = types.SimpleNamespace(Event=clocks.Event, Thread=clocks.Thread)
    logger = logging.getLogger("raystow")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    with (
        mock.patch.object(repository, "open_store", world.store_here),
        mock.patch.object(repository, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(reader, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(rewriting, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(survey, "ThreadPoolExecutor", clocks.Serially),
        mock.patch.object(leases, "threading", threading),
    ):
        try:
            yield
        finally:
            logger.setLevel(level)
