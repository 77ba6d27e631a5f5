"""The training process's connection to its node worker: stages saves in the background, and learns their outcomes."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...state.assignment import SMALL
from ...state.planned_chunk import DeviceChunks
from ...state.planner import SavePlan
from ...storage.commit.committer import UNKNOWN
from ...storage.errors import ClusterError, OutcomeUnknown, ProtocolError, RaystowError, SaveFailed
from ...storage.format.parts import is_part
from ...storage.format.root import Entry
from ...storage.log import about
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ..protocol.messages import (
    STAGING_ANSWERS,
    AbortSave,
    AttemptJoined,
    BaseDigests,
    BeginSave,
    DeviceAnswer,
    EndSave,
    Message,
    OpenSession,
    SaveContents,
    SaveDone,
    SaveLost,
    SaveStaged,
    SaveWarning,
    SessionOpened,
    SlotsFree,
    shortened,
)
from ..protocol.unix_channel import Connection
from ..shm.free_slots import DIED
from ..shm.ring import Ring
from . import gpu
from .host import stage_host
from .plan import SaveOrder
from .replica_digester import ReplicaDigester
from .staging_slots import StagingSlots

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_Answer = SlotsFree | AttemptJoined | SaveStaged | SaveDone | SaveLost | SaveWarning | BaseDigests | DeviceAnswer
_GRACE = 0.005, 2.0  # least and most seconds for an operation on tensors that were read meanwhile, in twice the time

_BRIEF = 64 << 20  # bytes of a part in host memory that is staged before those on devices
_FROM_HOST = "; of tensors in host memory, too"

OPENING = 60.0
"""Seconds within which a node worker must have allocated the ring of a session."""


class Staging:
    """``submit`` returns at once; saves are staged one after the other, on one thread.

    Attributes:
        connection: To the node worker.
        ring: The slots that it shares with this process.
        devices: Encodes chunks on GPUs.
        lost: Whether the node worker is gone.
    """

    def __init__(
        self, address: str, opening: OpenSession, *, codec: str = "auto", raw: bool = False, patience: float = OPENING
    ) -> None:
        """Connect to the node worker at ``address``, and take over the ring.

        Args:
            codec: Of chunks on a GPU.
            raw: Whether the node worker may store tensors in host memory without coding.
            patience: Seconds within which the node worker must have allocated the ring.
        """
        self._raw = raw
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self.connection = Connection.connect(address)
        with contextlib.ExitStack() as failed:
            failed.callback(self.connection.close)
            self.connection.send(opening)
            answer = self.connection.receive(SessionOpened, timeout=patience)
            if answer is None or answer[1] is None:
                raise ClusterError("the node worker closed the connection", subject=address)
            failed.pop_all()
        opened, descriptor = answer[0], answer[1]
        self.ring = Ring(descriptor, opened.slots, opened.slot_size, kept=opened.kept)
        self._slots = StagingSlots(self.ring, self.connection.post)
        self.devices = gpu.DeviceStaging(self._slots, self.connection.post, codec, opening.process, opened)
        self._replicas = ReplicaDigester()
        self._orders: queue.SimpleQueue[SaveOrder | SavePlan | None] = queue.SimpleQueue()
        self._open: dict[int, SaveOrder] = {}
        self._known_tensors: tuple[str, ...] | None = None  # the plain tensors that the coordinator knows
        self._lock = threading.Lock()
        self.lost, self._why = False, DIED
        self._threads = [
            background.start("raystow-stage", self._stage),
            background.start("raystow-listen", self._listen),
        ]

    def submit(self, order: SaveOrder) -> None:
        """Stage a save in the background."""
        with self._lock:
            if not self.lost:
                self._open[order.request.save] = order
                self._orders.put(order)
                return
        order.progress.read.set()  # the node worker died after the caller has looked, and nobody else would end this save
        order.on_end(SaveFailed(self._why, subject=order.subject))

    def prepare(self, plan: SavePlan) -> None:
        """Prepare saves of a plan like this in the background; see ``Checkpointer.prepare``."""
        self._orders.put(plan)

    def close(self, *, patience: float = 10.0, why: str = "") -> None:
        """Close the connection. The node worker completes saves that are staged, but their outcomes are not reported here.

        Saves that are not staged within ``patience`` seconds fail, for the reason ``why``.
        """
        self._why = why or DIED
        self._orders.put(None)
        self._threads[0].join(patience)
        if self._threads[0].is_alive():
            self.connection.close()
            self._threads[0].join()
        try:
            self.devices.close()  # before the node worker sees the end, and frees the device memory that is mapped here
        finally:
            self.connection.close()
            self._threads[1].join()
            self.ring.close()

    def _stage(self) -> None:
        while (order := self._orders.get()) is not None:
            if not isinstance(order, SaveOrder):
                self._prepare(order)
                continue
            self._slots.order = order
            try:
                assert order.plan is not None
                if order.plan.ready:
                    # The training launches kernels first, unless it waits for the staging.
                    order.progress.urgent.wait(self.devices.head_start)
                self._stage_all(order, order.plan)
            except RaystowError as error:
                self._give_up(order, error if isinstance(error, SaveFailed) else SaveFailed(str(error), subject=order.subject))
            except Exception as error:
                self._log.exception("staging failed", extra={"step": order.request.step})
                self._give_up(order, SaveFailed(f"staging failed: {error!r}", subject=order.subject))
            finally:
                if order.plan is not None:
                    order.plan.release()
                order.plan = None
                order.progress.read.set()

    def _prepare(self, plan: SavePlan) -> None:
        try:
            for device, group in plan.parts.items():
                if device is not None:
                    self.devices.prepare(device, group.pieces)
        except Exception as error:  # the first save does the same again, and reports what fails
            self._log.warning("the first save is not prepared: %s", error)
        finally:
            plan.release()

    def _stage_all(self, order: SaveOrder, plan: SavePlan) -> None:
        devices = sorted(device for device in plan.parts if device is not None)
        choices = [self.devices.choice(device) for device in devices]
        known, self._known_tensors = self._known_tensors, plan.plain_tensors
        new = () if known is self._known_tensors else self._known_tensors
        from_host = any(piece.on_host for device in devices for piece in plan.parts[device].pieces)
        coding = {choice.codec: choice.why + _FROM_HOST * from_host for choice in choices}
        nbytes = plan.whole_bytes if is_part(order.request.rank) else 0
        contents = SaveContents(*plan.coverage, plan.owned_dtensors, new, coding, nbytes)
        post, host = functools.partial(self._post, order), plan.parts.get(None)
        raw = self._raw and host is not None and any(one.nbytes > SMALL and one.dtype.is_float for one in host.pieces)
        self.connection.post(BeginSave(order.request, contents, plan.values, plan.chunks, plan.text, raw))
        compared = self._replicas.begin(plan)
        at_host = host is not None or bool(compared.on_host)
        early = at_host and (not devices or compared.host_bytes + _nbytes(host) <= _BRIEF)
        if early or from_host:
            _wait_for(plan.ready.values())
        begun = SYSTEM.monotonic()

        def stage_at_host() -> None:
            if host is not None:
                stage_host(plan, host, self._slots, post)
            compared.take_on_host()

        def read(grace: float) -> None:
            compared.wait_for_devices()
            if early or from_host:
                order.look_later(max(grace, _grace(begun)))
            else:
                order.all_read(grace)

        try:
            if early:  # the training waits until devices have read, but not until they have coded
                if not devices:
                    plan.find_derived()
                stage_at_host()
            for device in devices:
                last = device == devices[-1] and (early or not at_host)
                self.devices.stage(order, plan, device, read if last else lambda grace: None, post)
            if at_host and not early:
                _wait_for(plan.ready.values())
                plan.find_derived()
                begun = SYSTEM.monotonic()
                stage_at_host()
            compared.wait_for_devices()
            if not devices or (at_host and not early):
                order.all_read(_grace(begun))
            order.all_read()
        finally:
            compared.wait_for_devices()  # which read the tensors
        if order.changed:
            remedy = "call fence() before tensors change, or guard(optimizer) once"
            raise SaveFailed("the tensor changed while it was being saved", subject=order.changed, remedy=remedy)
        order.complete = True
        if (described := self._replicas.news(compared.groups)) is not None:
            self.connection.post(described)
        self.connection.post(EndSave(order.request.save, order.progress.stall, dict(plan.rounded()), compared.packed()))

    def _post(self, order: SaveOrder, message: Message) -> None:
        order.check()
        self.connection.post(message)

    def _give_up(self, order: SaveOrder, error: SaveFailed) -> None:
        """End a save, here and on the node."""
        self.connection.post(AbortSave(shortened(str(error))))
        self._end(order.request.save, error.with_traceback(None))  # which refers to the tensors, and to an encoder's memory

    def _listen(self) -> None:
        received: tuple[_Answer, int | None] | None
        try:
            while (received := self.connection.receive(*STAGING_ANSWERS)) is not None:
                match received[0]:
                    case SlotsFree(slots, ""):
                        self._slots.freed(slots)
                    case SaveDone(save, entry, warnings):
                        self._end(save, entry, warnings)
                    case AttemptJoined() as joined:
                        self._joined(joined)
                    case SaveStaged(save):
                        self._staged(save)
                    case SaveWarning(save, text):
                        self._warn(save, text)
                    case SaveLost(save) as lost:
                        self._end(save, lost.error)
                    case BaseDigests(device) as digests:
                        self.devices.bases[device] = digests
                    case answer:
                        self.devices.answers.put(answer)
            ended = True
        except Exception as broken:
            trace = not isinstance(broken, ProtocolError)
            self._log.error("the connection to the node worker is closed: %s", broken, exc_info=trace)
            self.connection.shut()
            ended = False
        with self._lock:
            self.lost = True
            orders = list(self._open.values())
        self._slots.close()
        self.devices.answers.put(None)
        for order in orders:
            error: RaystowError = SaveFailed(self._why, subject=order.subject)
            if order.complete and (order.progress.attempt is not None or not ended):
                error = OutcomeUnknown(f"{self._why}, after it had received everything", subject=order.subject, remedy=UNKNOWN)
            self._end(order.request.save, error)

    def _joined(self, joined: AttemptJoined) -> None:
        with self._lock:
            order = self._open.get(joined.save)
        if order is not None:
            order.progress.attempt, order.progress.trace = (joined.id, joined.attempt), joined.trace or order.progress.trace

    def _staged(self, save: int) -> None:
        with self._lock:
            order = self._open.get(save)
        if order is not None:
            order.progress.note_staged()

    def _warn(self, save: int, text: str) -> None:
        with self._lock:
            order = self._open.get(save)
        if order is not None:
            order.progress.warn(text)

    def _end(self, save: int, outcome: Entry | RaystowError, warnings: Sequence[str] = ()) -> None:
        with self._lock:
            order = self._open.pop(save, None)
        if order is None:
            return  # it has ended before
        order.failed = isinstance(outcome, RaystowError)
        for text in warnings:
            order.progress.warn(text)
        if not order.failed:
            order.progress.note_staged()
        order.on_end(outcome)


def _wait_for(events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def _grace(begun: float) -> float:
    """The seconds for which to wait for operations on tensors that were read since ``begun``."""
    return min(_GRACE[1], max(_GRACE[0], 2 * (SYSTEM.monotonic() - begun)))


def _nbytes(chunks: DeviceChunks | None) -> int:
    return 0 if chunks is None else sum(piece.nbytes for piece in chunks.pieces)
