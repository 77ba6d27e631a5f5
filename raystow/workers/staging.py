"""The training process's side: hands the chunks of its tensors over through the ring, in the background, and hears what became of
them. Those in host memory go as they are; those on a GPU are coded there first, where that pays: by this process, or by the node
worker's."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import numpy as np

from ..storage.clock import SYSTEM
from ..storage.coding.chunk import DEFLATE, ZSTD
from ..storage.coding.derived import followed
from ..storage.coding.dtypes import DType
from ..storage.coding.kernels import Bytes
from ..storage.coding.rounded import Rounded
from ..storage.errors import ClusterError, RaystowError, SaveFailed
from ..storage.format.root import Entry
from ..storage.log import about
from .ipc.offers import Named, Offers
from .ipc.ring import ALIGN, Ring
from .ipc.wire import Connection, Message

logger = logging.getLogger(__name__)

CODECS = ("auto", "deflate", "zstd", "ans", "raw", "cpu")
"""How chunks on a GPU are coded: by nvCOMP with one of its coders, or not at all, or by the node worker on its CPU."""

PLACES = ("training", "node")
"""Which process codes chunks on a GPU: the training process, or the node worker's, for training processes that must not be
touched."""

HEAD_START = 4e-3
"""Seconds in which a training that saves tensors on a GPU may launch kernels undisturbed, when ``save`` returns and when
``fence`` does. It has waited, so little is queued up, and the GPU would idle while the staging thread has the interpreter."""


class Piece(Protocol):
    """A chunk to stage: what is said of it, its bytes, and how to get them."""

    @property
    def device(self) -> int | None:
        """The CUDA device whose memory holds a chunk that is worth coding there; None for all others."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def dtype(self) -> DType:
        """What its words are."""

    @property
    def nbytes(self) -> int:
        """Bytes: at most ``SLOT``, or for one on a GPU ``DEVICE_CHUNK``."""

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before coding."""

    def copy(self, out: Bytes) -> None:
        """Copy the bytes into ``out``, row-major."""


class Follower(Protocol):
    """A chunk that need not be staged, if it follows from the chunk ``source``: see ``storage.coding.derived``."""

    @property
    def piece(self) -> Piece:
        """The chunk itself."""

    @property
    def source(self) -> Piece:
        """One of the plan's pieces, on the same device."""

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before it is looked at."""


class Part(Protocol):
    """Some chunks. The same objects as in the save before, if nothing has changed: what was worked out of them still holds."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """What is staged in any case."""

    @property
    def followers(self) -> Sequence[Follower]:
        """What is staged only if it does not follow from a piece."""


class Plan(Protocol):
    """What to stage. Only the thread that stages looks at it: working it out may take a while."""

    @property
    def parts(self) -> Mapping[int | None, Part]:
        """All chunks, by the CUDA device that codes them; None: the node worker does."""

    def look_again(self) -> None:
        """See what may follow from what in the saves to come. Called while tensors are staged, once or more."""

    def strayed(self, follower: Any) -> None:
        """It does not follow."""

    def rounded(self) -> Mapping[str, Rounded]:
        """What rounding has done to tensors, by name, when all is staged; ``SaveFailed`` if that is more than it may."""

    def let_go(self) -> None:
        """The tensors are needed no longer."""

    @property
    def coverage(self) -> tuple[int, int]:
        """``replicated`` and ``expected`` of ``port.Begin``."""

    @property
    def vouched(self) -> tuple[str, ...]:
        """``vouched`` of ``port.Begin``."""

    @property
    def ready(self) -> dict[int, Any]:
        """For each CUDA device an event, after which its tensors may be read."""


@dataclass
class Order:
    """One save: what to announce, what to stage, and whom to tell. Callbacks run on threads of the staging. ``urgent``: set when
    the training waits for the staging. ``stall``: for how many seconds it has done so; None where nobody counts. ``named``: what
    chunks on a GPU may be stored as differences to; unless ``patient``, as few as do not keep the training waiting."""

    save: int
    begin: dict[str, Any]
    plan: Plan | None
    on_staged: Callable[[], None]
    on_end: Callable[[Entry | RaystowError], None]
    on_warning: Callable[[str], None] = logger.warning
    urgent: threading.Event = field(default_factory=threading.Event)
    stall: Callable[[], float | None] = lambda: None
    named: Named | None = None
    patient: bool = True
    failed: bool = False


class Staging:
    """A connection to the node worker of this machine. ``submit`` returns at once; orders are staged one after the other."""

    def __init__(self, address: str, hello: Message, *, codec: str = "auto", compress_in: str = "training") -> None:
        """Connect and take over the ring. ``hello`` says who this is: see ``workers.session``. ``codec``: one of ``CODECS``,
        ``compress_in``: one of ``PLACES``."""
        self._codec, self._compress_in = codec, compress_in
        self._log = about(logger, repository=hello.get("uri"), rank=hello.get("rank"))
        self._connection = Connection.connect(address)
        self._connection.send({**hello, "compress_in": compress_in})
        answer = self._connection.receive()
        if answer is None or answer[1] is None:
            raise ClusterError("the node worker ended the conversation", subject=address)
        self._ring = Ring(answer[1], answer[0]["ring"], answer[0]["slot"])
        self._store_rate: float = answer[0]["store"]
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(self._ring.slots):
            self._free.put(slot)
        self._workbench: Any = None  # of workers.cuda, made when the first chunk on a GPU comes
        self._offers = Offers()
        self._of_devices: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # what the node worker says of device memory
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._open: dict[int, Order] = {}
        self._order: Order | None = None  # the one that is being staged
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

    def close(self, *, patience: float = 10.0) -> None:
        """End the conversation. Saves that were staged go on in the node worker; nobody here hears of them any more. What is not
        staged after ``patience`` seconds fails: a node worker that frees no slot is not waited for."""
        self._orders.put(None)
        self._threads[0].join(patience)
        if self._threads[0].is_alive():
            self._connection.close()
            self._threads[0].join()
        if self._workbench is not None:
            self._workbench.close()  # before the node worker hears of the end, and frees the device memory that is mapped here
        self._connection.close()
        self._threads[1].join()
        self._ring.close()

    def _stage(self) -> None:
        while (order := self._orders.get()) is not None:
            subject, self._order = f"save of step {order.begin['step']}", order
            try:
                assert order.plan is not None
                if order.plan.ready:
                    order.urgent.wait(HEAD_START)
                devices = sorted(device for device in order.plan.parts if device is not None)
                choices = [self._bench().choice(device) for device in devices]
                replicated, expected = order.plan.coverage
                coding = {choice.codec: choice.why for choice in choices}
                vouched = list(order.plan.vouched)
                more = {"replicated": replicated, "expected": expected, "vouched": vouched, "coding": coding}
                if order.begin.get("delta") and self._compress_in == "training" and coding.keys() & {DEFLATE, ZSTD}:
                    more["asks"] = True  # for the version that chunks may be differences to; by ANS none is coded
                    order.named = self._offers.of(order.save, surely=order.patient)
                self._connection.post({"begin": {**order.begin, **more}})
                self._hand_over(order, order.plan, devices)
                rounded = {name: astuple(found) for name, found in order.plan.rounded().items()}
                if returned := self._offers.returned():
                    self._connection.post({"returned": returned})
                self._connection.post({"end": order.save, "stall": order.stall(), "rounded": rounded})
            except RaystowError as error:
                self._give_up(order, error if isinstance(error, SaveFailed) else SaveFailed(str(error), subject=subject))
            except Exception as error:
                self._log.exception("staging failed", extra={"step": order.begin["step"]})
                self._give_up(order, SaveFailed(f"staging failed: {error!r}", subject=subject))
            finally:
                if order.plan is not None:
                    order.plan.let_go()
                order.plan = None
                order.on_staged()

    def _hand_over(self, order: Order, plan: Plan, devices: list[int]) -> None:
        """Stage everything; ``on_staged`` as soon as all has been read."""
        host = plan.parts.get(None)
        for device in devices:
            on_read = _nothing if host is not None or device != devices[-1] else order.on_staged
            self._stage_device(order, plan, device, on_read)
        if host is not None:
            for event in plan.ready.values():
                event.synchronize()
            plan.look_again()
            self._stage_host(order, plan, host)

    def _stage_device(self, order: Order, plan: Plan, device: int, on_read: Callable[[], None]) -> None:
        """Code what lies on a device, and at last what was thought to follow from that, and does not."""
        bench, after, part = self._bench(), plan.ready[device], plan.parts[device]
        following = list[Any]()

        def follow() -> None:
            following.append(bench.follow(device, part.followers, after=after))
            plan.look_again()

        def read() -> None:
            if not following[0].strays:
                on_read()
                if order.urgent.is_set():
                    SYSTEM.sleep(HEAD_START)

        encode = functools.partial(
            bench.encode, device, after=after, announce=functools.partial(self._announce_coded, order), urgent=order.urgent.is_set
        )
        encode(part.pieces, on_read=read, meanwhile=follow, named=order.named, patient=order.patient)
        self._announce(order, following[0].rows)
        strays = following[0].strays
        for follower in strays:
            plan.strayed(follower)
        if strays:
            encode([follower.piece for follower in strays], on_read=on_read)

    def _stage_host(self, order: Order, plan: Plan, part: Part) -> None:
        """Copy chunks into slots as they are, but those that follow from others."""
        followers: dict[int, list[Follower]] = defaultdict(list)
        for follower in part.followers:
            followers[id(follower.source)].append(follower)
        left = deque(part.pieces)
        slot, used, chunks = -1, 0, list[dict[str, Any]]()
        try:
            while left:
                piece = left.popleft()
                if slot < 0 or used + piece.nbytes > self._ring.slot_size:
                    if slot >= 0:
                        self._announce(order, chunks)
                        self._release(slot)
                    slot, used, chunks = self._take(), 0, []
                place = self._ring.slot(slot)[used : used + piece.nbytes]
                piece.copy(place)
                chunks.append({**piece.describe(), "parts": [(slot, used, piece.nbytes)]})
                used += -(-piece.nbytes // ALIGN) * ALIGN
                for follower in followers[id(piece)]:
                    if (digest := _followed(follower, place)) is not None:
                        chunks.append({**follower.describe(), "digest": digest})
                    else:
                        plan.strayed(follower)
                        left.append(follower.piece)
            self._announce(order, chunks)
        finally:
            if slot >= 0:
                self._release(slot)

    def _announce(self, order: Order, chunks: list[dict[str, Any]]) -> None:
        """Tell the node worker of chunks in slots, as they are."""
        self._post(order, {"chunks": chunks})

    def _announce_coded(self, order: Order, message: Message) -> None:
        """Tell it of chunks on a GPU that are coded, and in slots, or that are still on the device (see ``RemoteWorkbench``)."""
        self._post(order, message if "on_device" in message else {"coded": message})

    def _post(self, order: Order, message: Message) -> None:
        if order.failed:
            raise SaveFailed("it has failed already", subject=f"save of step {order.begin['step']}")
        self._connection.post(message)

    def _bench(self) -> Any:
        if self._workbench is None and self._compress_in == "node":
            from .cuda.node_mode.remote_workbench import RemoteWorkbench

            self._workbench = RemoteWorkbench(
                self._codec, send=self._connection.post, receive=self._of_device, lend=self._lend, local=self._local_bench
            )
        elif self._workbench is None:
            self._workbench = self._local_bench()
        return self._workbench

    def _local_bench(self) -> Any:
        from .cuda.workbench import Workbench

        return Workbench(self._ring, self._codec, take=self._take_soon, release=self._release, store=self._store_rate)

    def _of_device(self) -> Message:
        """What the node worker says next of device memory."""
        message = self._of_devices.get()
        if message is None:
            self._of_devices.put(None)
            raise ClusterError("the node worker died")
        return message

    def _lend(self) -> int:
        """Leave all slots but the first few to the node worker, for good: it fills them itself. The first one that it gets."""
        first = max(1, self._ring.slots // 4)
        kept, lent = list[int](), 0
        while lent < self._ring.slots - first:
            slot = self._take()
            if slot < first:
                kept.append(slot)
            else:
                lent += 1
        for slot in kept:
            self._free.put(slot)
        return first

    def _take_soon(self) -> int | None:
        """A free slot; None after a moment without one, in which the node worker was asked to hurry. ``SaveFailed`` if the save
        has failed meanwhile: what holds the slots may hold them for minutes."""
        try:
            slot = self._free.get(timeout=0.02)
        except queue.Empty:
            self._connection.post({"press": True})
            if self._order is not None and self._order.failed:
                raise SaveFailed("it has failed already", subject=f"save of step {self._order.begin['step']}") from None
            return None
        return self._checked(slot)

    def _take(self) -> int:
        while (slot := self._take_soon()) is None:
            pass
        return slot

    def _checked(self, slot: int | None) -> int:
        if slot is None:
            self._free.put(None)
            raise ClusterError("the node worker died")
        return slot

    def _release(self, slot: int) -> None:
        """Nothing more will be announced in this slot: it comes back when the node worker needs it no longer."""
        self._connection.post({"filled": slot})

    def _give_up(self, order: Order, error: SaveFailed) -> None:
        """End the order, here and on the node."""
        try:
            self._connection.post({"abort": str(error)})
        except RaystowError:
            pass  # the node worker is gone: nothing is left to be ended there
        self._end(order.save, error)

    def _hear(self) -> None:
        while (received := self._connection.receive()) is not None:
            message, descriptor = received
            if "device" in message:
                self._of_devices.put(message)
            elif message.keys() & {"lent", "planes", "offer", "named"}:
                self._offers.hear(message, descriptor)
            elif "free" in message:
                self._free.put(message["free"])
            elif "done" in message:
                fields = message["entry"]
                tuples = {name: tuple(fields[name]) for name in ("bases", "groups")}  # which come as lists
                self._offers.expected = message["serves"]
                self._end(message["done"], Entry(**{**fields, **tuples}), message["warnings"])
            elif "failed" in message:
                self._end(message["failed"], SaveFailed(message["what"], subject=message["subject"], remedy=message["remedy"]))
        self.lost = True
        self._offers.lost()
        self._free.put(None)
        self._of_devices.put(None)
        with self._lock:
            orders = list(self._open.values())
        for order in orders:
            self._end(order.save, SaveFailed("the node worker of this rank died", subject=f"save of step {order.begin['step']}"))

    def _end(self, save: int, outcome: Entry | RaystowError, warnings: Sequence[str] = ()) -> None:
        with self._lock:
            order = self._open.pop(save, None)
        if order is None:
            return  # it has ended before
        order.failed = isinstance(outcome, RaystowError)
        for text in warnings:
            order.on_warning(text)
        order.on_end(outcome)


def _nothing() -> None:
    pass


def _followed(follower: Follower, words: Bytes) -> int | None:
    """The digest of a chunk in host memory, if it follows from these words, which are as they will be stored."""
    raw = np.empty(follower.piece.nbytes, np.uint8)
    follower.piece.copy(raw)
    return followed(raw, words, follower.source.dtype.name, follower.piece.dtype.name)
