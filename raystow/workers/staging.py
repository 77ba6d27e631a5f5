"""The training process's side: copies chunks of its tensors into the ring, in the background, and hears what became of them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..storage.errors import ClusterError, RaystowError, SaveFailed
from ..storage.kernels import Bytes
from ..storage.root import Entry
from .ring import ALIGN, SLOT, Ring
from .wire import Connection, Message

logger = logging.getLogger(__name__)


class Piece(Protocol):
    """A chunk to stage: what is said of it, its bytes, and how to get them."""

    @property
    def nbytes(self) -> int:
        """Bytes, at most ``SLOT``."""

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before coding."""

    def copy(self, out: Bytes) -> None:
        """Copy the bytes into ``out``, row-major."""


@dataclass
class Order:
    """One save: what to announce, what to stage, and whom to tell. Callbacks run on threads of the staging."""

    save: int
    begin: dict[str, Any]
    pieces: Iterable[Piece]
    on_staged: Callable[[], None]
    on_end: Callable[[Entry | RaystowError], None]
    failed: bool = False


class Staging:
    """A connection to the node worker of this machine. ``submit`` returns at once; orders are staged one after the other."""

    def __init__(self, address: str, hello: Message) -> None:
        """Connect and take over the ring. ``hello`` says who this is: see ``workers.session``."""
        self._connection = Connection.connect(address)
        self._connection.send(hello)
        answer = self._connection.receive()
        if answer is None or answer[1] is None:
            raise ClusterError("the node worker ended the conversation", subject=address)
        self._ring = Ring(answer[1], answer[0]["ring"])
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(self._ring.slots):
            self._free.put(slot)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._open: dict[int, Order] = {}
        self._lock = threading.Lock()
        self.lost = False
        self._threads = [
            threading.Thread(target=run, name=f"raystow-{run.__name__}", daemon=True) for run in (self._stage, self._hear)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: Order) -> None:
        """Stage a save in the background."""
        with self._lock:
            self._open[order.save] = order
        self._orders.put(order)

    def close(self) -> None:
        """End the conversation. Saves that were staged go on in the node worker; nobody here hears of them any more."""
        self._orders.put(None)
        self._threads[0].join()
        self._connection.close()
        self._threads[1].join()
        self._ring.close()

    def _stage(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._connection.send({"begin": order.begin})
                for slot, chunks in self._fill(order):
                    self._connection.send({"slot": slot, "chunks": chunks})
                self._connection.send({"end": order.save})
            except RaystowError as error:
                self._end(order.save, SaveFailed(str(error), subject=f"save of step {order.begin['step']}"))
            except Exception as error:
                logger.exception("staging failed")
                self._connection.close()  # the node worker gives the attempt up when it sees us gone
                self._end(order.save, SaveFailed(f"staging failed: {error}", subject=f"save of step {order.begin['step']}"))
            finally:
                order.pieces = ()
                order.on_staged()

    def _fill(self, order: Order) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Slots full of chunks, each with what is said of them."""
        slot, used, chunks = -1, SLOT, list[dict[str, Any]]()
        for piece in order.pieces:
            if order.failed:
                break
            if used + piece.nbytes > SLOT:
                if chunks:
                    yield slot, chunks
                slot, used, chunks = self._take(), 0, []
            piece.copy(self._ring.slot(slot)[used : used + piece.nbytes])
            chunks.append({**piece.describe(), "at": used})
            used += -(-piece.nbytes // ALIGN) * ALIGN
        if chunks:
            yield slot, chunks

    def _take(self) -> int:
        slot = self._free.get()
        if slot is None:
            self._free.put(None)
            raise ClusterError("the node worker died")
        return slot

    def _hear(self) -> None:
        while (received := self._connection.receive()) is not None:
            message = received[0]
            if "free" in message:
                self._free.put(message["free"])
            elif "done" in message:
                self._end(message["done"], Entry(**message["entry"]))
            elif "failed" in message:
                self._end(message["failed"], SaveFailed(message["what"], subject=message["subject"], remedy=message["remedy"]))
        self.lost = True
        self._free.put(None)
        with self._lock:
            orders = list(self._open.values())
        for order in orders:
            self._end(order.save, SaveFailed("the node worker of this rank died", subject=f"save of step {order.begin['step']}"))

    def _end(self, save: int, outcome: Entry | RaystowError) -> None:
        with self._lock:
            order = self._open.pop(save, None)
        if order is None:
            return  # it has ended before
        order.failed = isinstance(outcome, RaystowError)
        order.on_end(outcome)
