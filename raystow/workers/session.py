"""One training process as its node worker sees it: a connection, a ring, and the saves that come through them."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..storage.coding.rounded import Rounded
from ..storage.errors import RaystowError, SaveFailed
from ..storage.format import values
from ..storage.format.boxes import Box
from ..storage.log import about
from ..storage.retention.policy import Policy
from .ipc.arrival import Layout
from .ipc.ring import Ring
from .ipc.slots import Slots
from .ipc.wire import Connection, Message
from .memory.former import Former, Lending
from .memory.memory_tier import Loan
from .packing.attempt import NodeAttempt, Outcome, draft
from .port import Begin

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a session asks of its node."""

    def open_attempt(self, uri: str, repository: str, begin: Begin) -> tuple[NodeAttempt, int]:
        """Join the attempt of a save to the repository at ``uri``, which has the id ``repository``; the attempt, and this node's
        number in it."""

    def farewell(self, uri: str, rank: int, incarnation: str, reason: str) -> None:
        """A training process has ended: tell the coordinator of the repository at ``uri``."""

    def store_rate(self, uri: str) -> float:
        """Bytes per second that the store of the repository at ``uri`` has taken so far; 0 if that is not known."""

    def grow(self, nbytes: int) -> None:
        """Adapt the budget of coded bytes by a process's share."""

    def keep_in_memory(self, nbytes: int | None) -> None:
        """Keep the newest version in so many bytes of this node's memory; None: as many as it thinks right."""

    def replicate(self, repository: str, replicas: int, rate: float | None) -> None:
        """Copy what is kept of a repository into the memory of so many other nodes, at ``rate`` bytes per second at most."""


class GpuCoder(Protocol):
    """Codes what lies in device memory, for training processes that must not be touched: see ``workers.cuda.node_mode``."""

    def ask(self, message: Message) -> None:
        """A device is to be used: answer the training process."""

    def code(self, work: Message, attempt: NodeAttempt | None, number: int) -> None:
        """Code the chunks in a slot of device memory; ``number`` is this node's in the attempt."""

    def end(self, attempt: NodeAttempt) -> None:
        """Tell the attempt that the rank has finished, when all that was given to ``code`` before is coded."""

    def close(self) -> None:
        """Get through with what is left, and give all memory back."""


class Session:
    """Serves one connection on a thread of its own until the training process goes away."""

    def __init__(self, connection: Connection, host: Host, node: str) -> None:
        self._connection, self._host, self._node = connection, host, node
        self._ring: Ring | None = None
        self._slots: Slots | None = None
        self._coder: GpuCoder | None = None
        self._hello: Message = {}
        self._log = about(logger)
        self._layouts: dict[int, Layout] = {}  # of the chunks on each device
        self._on_gpu = set[tuple[str, Box]]()  # chunks that the training process has coded there
        self._asks = False  # what chunks on a GPU may be differences to
        self._offered = (0, False)  # the version of which it has heard all, and whether of decoded planes as well
        self._loans: dict[int, Loan] = {}  # what it has of the memory tier
        self._numbers = itertools.count()  # of loans
        self._attempt: NodeAttempt | None = None
        self._number = 0

    def serve(self, hello: Message) -> None:
        """Handle messages until the connection ends. ``hello``: the first."""
        try:
            self._hello, self._log = hello, about(logger, repository=hello["uri"], rank=hello["rank"])
            self._host.keep_in_memory(self._hello.get("keep_in_memory"))
            if self._hello.get("replicas") is not None:
                self._host.replicate(self._hello["repository"], self._hello["replicas"], self._hello["replica_rate"])
            coded = int(self._hello["coded"])
            self._ring = Ring.create(int(self._hello["ring"]), int(self._hello["slot"]))
            self._slots = Slots(self._ring, self._tell_free)
            self._host.grow(coded)
            try:
                rate = self._host.store_rate(self._hello["uri"])
                answer = {"ring": self._ring.slots, "slot": self._ring.slot_size, "store": rate}
                self._connection.send(answer, fd=self._ring.fd)
                if self._hello.get("compress_in") == "node":
                    self._coder = self._gpu_coder(self._ring)
                self._receive()
            finally:
                if self._coder is not None:
                    self._coder.close()
                self._slots.wait()
                self._take_back(self._loans)
                self._host.grow(-coded)
                self._ring.close()
        except RaystowError as error:
            self._log.warning("a training process went away: %s", error)
        finally:
            self._connection.close()

    def _receive(self) -> None:
        while (received := self._connection.receive()) is not None:
            message = received[0]
            if "begin" in message:
                self._begin(message["begin"])
            elif "chunks" in message:
                self._chunks(message["chunks"])
            elif "coded" in message:
                self._coded(**message["coded"])
            elif "on_device" in message and self._coder is not None:
                self._coder.code(message["on_device"], self._attempt, self._number)
            elif "device" in message:
                self._device(message)
            elif "filled" in message and self._slots is not None:
                self._slots.filled(message["filled"])
            elif "press" in message and self._attempt is not None:
                self._attempt.press()
            elif "abort" in message and self._attempt is not None:
                self._attempt.fail(message["abort"])
                self._attempt = None
            elif "end" in message and self._attempt is not None:
                self._attempt.stalled(message.get("stall"))
                self._attempt.rounded({name: Rounded(*found) for name, found in message.get("rounded", {}).items()})
                if self._asks:
                    self._attempt.on_gpu |= self._on_gpu
                if self._coder is not None:
                    self._coder.end(self._attempt)
                else:
                    self._attempt.finished(self._hello["rank"])
                self._attempt = None
            elif "returned" in message:
                self._take_back(message["returned"])
        who = f"rank {self._hello['rank']} (process {self._hello['pid']})"
        if self._attempt is not None:
            self._attempt.fail(f"{who} died while it was staging")
        self._host.farewell(
            self._hello["uri"], self._hello["rank"], self._hello["incarnation"], f"{who} went away before it saved"
        )

    def _begin(self, fields: dict[str, Any]) -> None:
        save, rank = fields["save"], self._hello["rank"]
        self._asks = fields.get("asks", False)
        begin = Begin(
            rank=rank,
            world_size=self._hello["world_size"],
            incarnation=self._hello["incarnation"],
            save=save,
            node=self._node,
            step=fields["step"],
            timeout=fields["timeout"],
            replicated=fields["replicated"],
            vouched=tuple(fields.get("vouched", ())),
            expected=fields["expected"],
            metrics={name: values.decode(form) for name, form in fields["metrics"].items()},
            coding=fields.get("coding", {}),
            lossy=fields.get("lossy", {}),
            retention=Policy.load(fields["retention"]) if fields.get("retention") else None,
            delta=fields.get("delta", 0),
        )
        try:
            attempt, self._number = self._host.open_attempt(self._hello["uri"], self._hello["repository"], begin)
        except Exception as error:
            if not isinstance(error, RaystowError):
                self._log.exception("a save could not begin", extra={"step": begin.step})
                error = SaveFailed(f"the node worker failed: {error!r}", subject=f"save of step {begin.step}")
            self._attempt = None
            self._tell(save, False, error)
            if self._asks:
                self._name(save, None)
            return
        tell = functools.partial(self._tell, save, attempt.serves)
        attempt.join(rank, [(v[0], v[1], v[2]) for v in fields["values"]], tell)
        self._attempt = attempt
        if self._asks:
            self._name(save, attempt.former)

    def _name(self, save: int, former: Former | None) -> None:
        """Say what the chunks of a save may be stored as differences to. Of a version that is new the memory is lent before, and
        once more when its planes have been decoded, or had to go."""
        if former is not None and (former.home.id, former.unfolded) != self._offered:
            try:
                lent = former.lend(self._on_gpu)
            except RaystowError as error:
                self._log.warning("version %d serves no chunk on a GPU: %s", former.home.id, error)
                former = None
            else:
                self._offer(former.home.id, lent)
        self._connection.send({"save": save, "named": former.home.id if former is not None else 0})

    def _offer(self, id: int, lent: Lending) -> None:
        loans: list[tuple[Message, Loan]] = [({"lent": of}, loan) for of, loan in lent.packs.items()]
        if lent.planes is not None:
            loans.append(({"planes": True}, lent.planes))
        numbered = [(next(self._numbers), what, loan) for what, loan in loans]
        self._loans.update({number: loan for number, _, loan in numbered})
        try:
            for number, what, loan in numbered:
                self._connection.send({**what, "nbytes": loan.nbytes, "loan": number}, fd=loan.descriptor)
        finally:
            for _, loan in loans:
                os.close(loan.descriptor)
        self._connection.send({"offer": id, "fragment": lent.fragment, "starts": lent.starts})
        self._offered = id, lent.planes is not None

    def _take_back(self, numbers: Iterable[int]) -> None:
        """The process does not look at this memory any more."""
        for number in list(numbers):
            self._loans.pop(number).end()

    def _chunks(self, announced: list[dict[str, Any]]) -> None:
        """Take over chunks that lie in slots, raw ones to be coded, coded ones as they are; note those that are derived."""
        assert self._slots is not None
        attempt = self._attempt
        if attempt is None or attempt.over:  # the save failed: let the training process get through with it
            return
        for fields in announced:
            chunk = draft(fields, self._number)
            if chunk.derivation is not None:
                attempt.add_derived(self._hello["rank"], chunk)
                continue
            parts, done = self._slots.take_over(fields["parts"])
            if "coding" in fields:
                attempt.add_coded(self._hello["rank"], chunk, parts, done)
            else:
                attempt.add(self._hello["rank"], chunk, parts[0], done)

    def _coded(self, device: int, layout: Message | None = None, arrived: Sequence[Message] = ()) -> None:
        """Take over chunks of a device that were coded by the training process; ``layout`` says of which it will speak."""
        if layout is not None:
            made = self._layouts[device] = Layout(layout)
            self._on_gpu |= made.boxes
        for message in arrived:
            self._chunks(list(self._layouts[device].rows(message)))

    def _gpu_coder(self, ring: Ring) -> GpuCoder | None:
        """What codes on this node's GPUs; None, with a warning, if this process lacks what that takes. Loads torch and Triton."""
        try:
            from .cuda.node_mode.node_encoder import NodeEncoder

            return NodeEncoder(ring, self._hello["rank"], self._connection.send)
        except ImportError as error:
            logger.warning("the node worker cannot code on GPUs: %s", error)
            return None

    def _device(self, message: Message) -> None:
        if self._coder is not None:
            self._coder.ask(message)
        else:
            problem = "the node worker's process cannot load torch or Triton; its log says why"
            self._connection.send({"device": message["device"], "problem": problem})

    def _tell_free(self, slots: list[int]) -> None:
        try:
            for slot in slots:
                self._connection.send({"free": slot})
        except RaystowError:
            pass  # the process is gone: its session ends on its own thread

    def _tell(self, save: int, serves: bool, outcome: Outcome, warnings: Sequence[str] = ()) -> None:
        """What became of a save. ``serves``: whether later versions should be differences to this one, if it is whole."""
        if isinstance(outcome, RaystowError):
            message = {"failed": save, "what": outcome.what, "subject": outcome.subject, "remedy": outcome.remedy}
        else:
            expects = serves or bool(outcome.bases)
            message = {"done": save, "entry": vars(outcome), "warnings": list(warnings), "serves": expects}
        try:
            self._connection.send(message)
        except RaystowError:
            self._log.info("the outcome of a save has no one left to hear it: %s", outcome)
