"""A rank's connection to its node worker, made for the first save or before it."""

from __future__ import annotations

import logging
import threading

from ...storage import background
from ...storage.errors import RaystowError, StateError
from ...workers.staging.client import Staging
from ..save.planner import SavePlan
from .open_session import open_session
from .options import Compression, Memory, Replication
from .startup import Startup, node_address

logger = logging.getLogger(__name__)


class NodeConnection:
    """Connects on demand, again if the node worker has died. Methods may be called on any thread.

    Args:
        startup: The rank, and its coordinator.
        options: The rank's options.
        codec: The codec of tensors on a GPU.
    """

    def __init__(self, startup: Startup, options: tuple[Memory, Compression, Replication], *, codec: str) -> None:
        self._startup, self._options, self._codec = startup, options, codec
        self._staging: Staging | None = None
        self._closed = False
        self._lock = threading.RLock()

    @property
    def made(self) -> bool:
        """Whether a connection was made."""
        return self._staging is not None

    def staging(self, plan: SavePlan) -> Staging:
        """Return the connection, whose memory is sized for the first plan."""
        with self._lock:
            if self._closed:
                raise StateError("this Checkpointer is closed", subject=self._startup.uri)
            if self._staging is not None and self._staging.lost:
                self.reset()
            if self._staging is None:
                startup = self._startup
                opening = open_session(startup.uri, startup.wait().repository, startup.member, plan, self._options)
                self._staging = Staging(node_address(), opening, codec=self._codec)
            return self._staging

    def prepare(self, plan: SavePlan) -> None:
        """Connect and prepare saves like this plan in the background. A failure is logged."""
        background.start("raystow-prepare", self._prepare, plan)

    def reset(self, *, patience: float = 10.0, why: str = "") -> None:
        """Disconnect; the next save connects again. Saves that are not staged within ``patience`` seconds fail. ``why``: reported
        by them."""
        with self._lock:
            staging, self._staging = self._staging, None  # not used again, also if it cannot be closed
            if staging is not None:
                staging.close(patience=patience, why=why)

    def close(self) -> None:
        """Disconnect for good."""
        with self._lock:
            self._closed = True
            self.reset()

    def _prepare(self, plan: SavePlan) -> None:
        try:
            self.staging(plan).prepare(plan)
        except RaystowError as error:
            if not self._closed:
                logger.warning("the first save is not prepared, and will take longer: %s", error)
