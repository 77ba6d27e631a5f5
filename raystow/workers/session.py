"""One training process as its node worker sees it: a connection, a ring, and the saves that come through them."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

from ..storage import values
from ..storage.errors import RaystowError, SaveFailed
from .attempt import NodeAttempt, Outcome, draft
from .port import Begin
from .ring import Ring
from .wire import Connection, Message

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a session asks of its node."""

    def open_attempt(self, uri: str, repository: str, begin: Begin) -> tuple[NodeAttempt, int]:
        """Join the attempt of a save to the repository at ``uri``, which has the id ``repository``; the attempt, and this node's
        number in it."""

    def farewell(self, uri: str, rank: int, incarnation: str, reason: str) -> None:
        """A training process has ended: tell the coordinator of the repository at ``uri``."""

    def grow(self, nbytes: int) -> None:
        """Adapt the budget of coded bytes by a process's share."""


class Session:
    """Serves one connection on a thread of its own until the training process goes away."""

    def __init__(self, connection: Connection, host: Host, node: str) -> None:
        self._connection, self._host, self._node = connection, host, node
        self._ring: Ring | None = None
        self._hello: Message = {}
        self._attempt: NodeAttempt | None = None
        self._number = 0
        self._reading = 0  # chunks in the ring that are still being coded
        self._changed = threading.Condition()

    def serve(self) -> None:
        """Handle messages until the connection ends."""
        try:
            first = self._connection.receive()
            if first is None:
                return
            self._hello = first[0]
            coded = int(self._hello["coded"])
            self._ring = Ring.create(int(self._hello["ring"]))
            self._host.grow(coded)
            try:
                self._connection.send({"ring": self._ring.slots}, fd=self._ring.fd)
                self._receive()
            finally:
                with self._changed:
                    self._changed.wait_for(lambda: not self._reading)
                self._host.grow(-coded)
                self._ring.close()
        except RaystowError as error:
            logger.warning("a training process went away: %s", error)
        finally:
            self._connection.close()

    def _receive(self) -> None:
        while (received := self._connection.receive()) is not None:
            message = received[0]
            if "begin" in message:
                self._begin(message["begin"])
            elif "slot" in message:
                self._slot(message["slot"], message["chunks"])
            elif "end" in message and self._attempt is not None:
                self._attempt.finished(self._hello["rank"])
                self._attempt = None
        who = f"rank {self._hello['rank']} (process {self._hello['pid']})"
        if self._attempt is not None:
            self._attempt.fail(f"{who} died while it was staging")
        self._host.farewell(
            self._hello["uri"], self._hello["rank"], self._hello["incarnation"], f"{who} went away before it saved"
        )

    def _begin(self, fields: dict[str, Any]) -> None:
        save, rank = fields["save"], self._hello["rank"]
        begin = Begin(
            rank=rank,
            world_size=self._hello["world_size"],
            incarnation=self._hello["incarnation"],
            save=save,
            node=self._node,
            step=fields["step"],
            timeout=fields["timeout"],
            replicated=fields["replicated"],
            expected=fields["expected"],
            metrics={name: values.decode(form) for name, form in fields["metrics"].items()},
        )
        try:
            attempt, self._number = self._host.open_attempt(self._hello["uri"], self._hello["repository"], begin)
        except Exception as error:
            if not isinstance(error, RaystowError):
                logger.exception("a save could not begin")
                error = SaveFailed(f"the node worker failed: {error!r}", subject=f"save of step {begin.step}")
            self._attempt = None
            self._tell(save, error)
            return
        attempt.join(rank, [(v[0], v[1], v[2]) for v in fields["values"]], lambda outcome: self._tell(save, outcome))
        self._attempt = attempt

    def _slot(self, index: int, announced: list[dict[str, Any]]) -> None:
        """Code the chunks in a slot, and free it when the last one has been read."""
        assert self._ring is not None
        slot, attempt = self._ring.slot(index), self._attempt
        if attempt is None or attempt.over:  # the save failed: let the training process get through with it
            self._connection.send({"free": index})
            return
        left = [len(announced)]

        def done() -> None:
            with self._changed:
                self._reading -= 1
                left[0] -= 1
                last = not left[0]
                self._changed.notify_all()
            if last:
                try:
                    self._connection.send({"free": index})
                except RaystowError:
                    pass  # the process is gone: its session ends on its own thread

        with self._changed:
            self._reading += len(announced)
        for fields in announced:
            chunk = draft(fields, self._number)
            attempt.add(self._hello["rank"], chunk, slot[fields["at"] : fields["at"] + chunk.nbytes], done)

    def _tell(self, save: int, outcome: Outcome) -> None:
        if isinstance(outcome, RaystowError):
            message = {"failed": save, "what": outcome.what, "subject": outcome.subject, "remedy": outcome.remedy}
        else:
            message = {"done": save, "entry": vars(outcome)}
        try:
            self._connection.send(message)
        except RaystowError:
            logger.info("the outcome of a save has no one left to hear it: %s", outcome)
