"""One training process as its node worker sees it: a connection, a ring, and the saves that are staged through them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace

from ...state.chunk_info import RangeInfo
from ...storage.coding.chunk import RAW
from ...storage.coding.derived import Derivation
from ...storage.coding.digest import process_keys
from ...storage.coding.dtypes import dtype
from ...storage.errors import RaystowError, SaveFailed
from ...storage.format.parts import part_number
from ...storage.format.rank_spans import member_text
from ...storage.log import about
from ...storage.stores.settings import StoreAddress
from ..cache.base_version import KnownChunks
from ..chosen_codec import ChosenCodec
from ..packing.attempt import NodeAttempt, Outcome, draft, taken_over
from ..protocol.messages import (
    STAGING,
    AbortSave,
    AttemptJoined,
    AttemptKey,
    BaseDigests,
    Begin,
    BeginSave,
    CheckDevice,
    ChunkDigests,
    CodedLayout,
    ComparedChunks,
    DescribeReplicas,
    DeviceQuestion,
    DeviceRefused,
    EndSave,
    FlushPacks,
    Incarnation,
    LendSlots,
    Message,
    OpenDevice,
    OpenSession,
    RawChunk,
    SaveContents,
    SaveDone,
    SaveLost,
    SaveStaged,
    SaveWarning,
    SessionOpened,
    SlotsFilled,
    SlotsFree,
    StageCoded,
    StageDerived,
    StageOnDevice,
    StageRaw,
)
from ..protocol.unix_channel import Connection
from ..shm.coded_layout import Layout
from ..shm.ring import Ring
from ..shm.slots import Slots

if TYPE_CHECKING:
    from ..gpu.node_mode.node_encoder import NodeEncoder

logger = logging.getLogger(__name__)

_LOW = (1 << 64) - 1
_BASES = 3  # versions besides the newest that a process may still refer to, since it does not know of a newer one yet


class SessionHost(Protocol):
    """The node as its sessions see it: ``Node``, whose module imports this one."""

    def open_attempt(self, store: StoreAddress, repository: str, begin: Begin) -> tuple[NodeAttempt, int]:
        """Join the attempt of a save to the repository in ``store``, which has the id ``repository``. Return the attempt, and
        this node's number in it."""

    def rank_disconnected(self, store: StoreAddress, rank: int, incarnation: Incarnation, reason: str) -> None:
        """Report the end of a training process to the coordinator of the repository in ``store``."""

    def store_rate(self, store: StoreAddress) -> float:
        """Return the bytes per second that the store of the repository in ``store`` has taken so far; 0 if unknown."""

    def host_coding(self, store: StoreAddress) -> ChosenCodec:
        """Choose whether tensors in host memory are coded before they are stored there."""

    def grow(self, nbytes: int) -> None:
        """Add a process's share to the budget of coded bytes."""

    def limit_cache(self, nbytes: int | None) -> None:
        """Limit this node's memory for the newest version; None restores the default."""

    def admit(self, slots: Slots) -> bool:
        """Let a ring keep versions, within this node's memory for them; return False if too little of that is left."""

    def make_way(self, slots: Slots, attempt: AttemptKey, nbytes: int) -> None:
        """Let older versions leave a ring that an attempt will fill with up to ``nbytes`` bytes."""

    def replicate(self, repository: str, replicas: int, rate: float | None) -> None:
        """Copy what is kept of a repository to ``replicas`` other nodes, at ``rate`` bytes per second at most."""


class Session:
    """Serves one connection on a thread of its own until the training process goes away."""

    def __init__(self, connection: Connection, host: SessionHost, node: str, opening: OpenSession) -> None:
        self._connection, self._host, self._node, self._opening = connection, host, node, opening
        if opening.part:
            part_number(opening.part)  # so that texts name it
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self._coder: NodeEncoder | None = None  # for a training process that must not use the GPU for it
        self._layouts: dict[int, Layout] = {}  # of the chunks on each device
        self._arriving: set[int] = set()  # devices of which coded chunks arrive in this save
        self._compared: dict[int, ComparedChunks] = {}  # by device
        self._bases: dict[int, KnownChunks] = {}  # by id, the versions that this process may refer to
        self._sent: dict[int, tuple[int, int]] = {}  # by device, the version and the chunks whose digests were sent last
        self._replicas: Mapping[int, Sequence[RangeInfo]] = {}  # by group, what the process compares with others
        self._attempt: NodeAttempt | None = None
        self._number, self._raw = 0, False

    def serve(self) -> None:
        """Handle messages until the connection ends."""
        opening = self._opening
        try:
            self._host.limit_cache(opening.cache)
            self._host.replicate(opening.repository, opening.replicas, opening.replication_rate)
            self._slots = self._admitted_slots()
            ring = self._slots.ring
            self._host.grow(opening.coded)
            try:
                rate = self._host.store_rate(opening.store)
                self._connection.send(
                    SessionOpened(ring.slots, ring.slot_size, rate, process_keys().secret, ring.kept), fd=ring.fd
                )
                if opening.process == "node":
                    self._coder = self._gpu_coder(ring)
                self._receive()
            finally:
                if self._coder is not None:
                    self._coder.close()
                self._slots.wait()
                self._host.grow(-opening.coded)
                self._slots.retire()
        except RaystowError as error:
            self._log.warning("the connection to a training process ended: %s", error)
        finally:
            self._connection.close()

    def _admitted_slots(self) -> Slots:
        """Create the ring, with slots for versions if the memory tier admits them."""
        opening = self._opening
        slots = Slots(Ring.create(opening.ring, opening.slot, keep=opening.keep), self._tell_free)
        if not opening.keep or self._host.admit(slots):
            return slots
        slots.retire()
        self._log.warning("saves are copied into this node's memory: its limit does not leave %d bytes pinned", opening.keep)
        return Slots(Ring.create(opening.ring, opening.slot), self._tell_free)

    def _receive(self) -> None:
        opening = self._opening
        who = f"{member_text(opening.rank)} (process {opening.pid})"
        try:
            while (received := self._connection.receive(*STAGING)) is not None:
                self._handle(received[0])
        finally:
            if self._attempt is not None:
                self._attempt.fail(f"{who} died while it was staging")
            self._host.rank_disconnected(opening.store, opening.rank, opening.incarnation, f"{who} went away before it saved")

    def _handle(self, message: Message) -> None:
        attempt, rank = self._attempt, self._opening.rank
        active = attempt if attempt is not None and not attempt.over else None  # what comes for a failed save is dropped
        match message:
            case StageRaw(chunks) if active is not None:
                self._take_over(active, chunks)
            case StageDerived(chunks) if active is not None:
                for one in chunks:
                    derivation = Derivation(one.source, one.source_dtype)
                    active.add_derived(rank, draft(one.info, self._number, raw_digest=one.digest, derivation=derivation))
            case StageCoded(device, arrived) if active is not None:
                if device not in self._arriving:
                    self._arriving.add(device)
                    key = AttemptKey(self._opening.repository, active.id, active.name)
                    self._host.make_way(self._slots, key, self._layouts[device].nbytes)
                for batches in arrived:
                    active.add_coded(rank, taken_over(self._slots, [*self._layouts[device].chunks(batches)], self._number))
            case ComparedChunks(device):
                self._compared[device] = message
                self._send_base_digests()
            case ChunkDigests() if active is not None:
                self._note_digests(active, message)
            case CodedLayout(device):
                self._layouts[device] = Layout(message)
            case SlotsFilled(slots):
                self._slots.filled(slots)
            case FlushPacks() if attempt is not None:
                attempt.flush()
            case BeginSave():
                self._begin(message)
            case AbortSave(reason) if attempt is not None:
                attempt.fail(reason)
                self._attempt = None
            case DescribeReplicas(groups, anew):
                self._replicas = groups if anew else {**self._replicas, **groups}
            case EndSave() if attempt is not None:
                self._end(attempt, message)
            case StageOnDevice() if self._coder is not None:
                self._coder.code(message, attempt, self._number)
            case OpenDevice() | CheckDevice() | LendSlots():
                self._ask(message)

    def _take_over(self, attempt: NodeAttempt, chunks: Sequence[RawChunk]) -> None:
        """Add chunks in host memory: those that are stored raw, which stay in the ring until then, and those that are coded."""
        raw, coded = list[RawChunk](), list[RawChunk]()
        for chunk in chunks:
            (raw if self._raw and dtype(chunk.info.dtype).is_float else coded).append(chunk)
        if raw:
            taken = self._slots.take_over_each([[(chunk.slot, chunk.start, chunk.nbytes)] for chunk in raw])
            drafts = (draft(chunk.info, self._number) for chunk in raw)
            attempt.add_raw(self._opening.rank, [(row, parts, use) for row, (parts, use) in zip(drafts, taken, strict=True)])
        if coded:
            elements, done = self._slots.take_over([(chunk.slot, chunk.start, chunk.nbytes) for chunk in coded])
            rows = [draft(chunk.info, self._number) for chunk in coded]
            attempt.add(self._opening.rank, list(zip(rows, elements, strict=True)), done)

    def _contents(self, message: BeginSave) -> SaveContents:
        """Choose how tensors in host memory are stored; return what the save says of itself, with the reason."""
        self._raw = False
        if not message.raw:
            return message.contents
        choice, known = self._host.host_coding(self._opening.store), message.contents.coding
        self._raw = choice.codec == RAW
        why = "; ".join(filter(None, (known.get(choice.codec), choice.why)))  # a GPU may use the same codec
        return replace(message.contents, coding={**known, choice.codec: why})

    def _begin(self, message: BeginSave) -> None:
        request, begin = message.request, Begin(self._node, message.request, self._contents(message))
        try:
            attempt, self._number = self._host.open_attempt(self._opening.store, self._opening.repository, begin)
        except Exception as error:
            if not isinstance(error, RaystowError):
                self._log.exception("a save could not begin", extra={"step": request.step})
                error = SaveFailed(f"the node worker failed: {error!r}", subject=f"save of step {request.step}")
            self._attempt = None
            self.tell(request.save, error)
            return
        # Sent before the rank can be complete: a process that has not received it knows that its save is no version.
        self._attempt = attempt
        self._arriving.clear()
        self._connection.send(AttemptJoined(request.save, attempt.id, attempt.name, attempt.trace))
        tell, warn = (functools.partial(call, request.save) for call in (self.tell, self._warn))
        attempt.join(request.rank, message.values, tell, warn, chunks=message.chunks, text=message.text)
        self._send_base_digests()

    def _note_digests(self, attempt: NodeAttempt, message: ChunkDigests) -> None:
        """Add references for the chunks that have not changed, and note the digests of the others, which come later."""
        infos, base = self._compared[message.device].chunks, self._bases.get(message.base)
        numbers = np.frombuffer(message.numbers, "<i8").tolist()
        digests = np.frombuffer(message.digests, "<u8").tolist()
        secret = np.frombuffer(message.secret, "<u8").reshape(2, -1).T.tolist()
        for number, digest, (low, high), same in zip(numbers, digests, secret, message.same, strict=True):
            chunk, second = draft(infos[number], self._number, raw_digest=digest), low | high << 64
            if same:
                attempt.refer(self._opening.rank, chunk, second, base)
            else:
                attempt.note(chunk, second)

    def _send_base_digests(self) -> None:
        """Send the digests of the version that the save is compared with, once for each version and set of chunks."""
        base = self._attempt.base if self._attempt is not None else None
        for device, compared in self._compared.items():
            which = (base.id if base is not None else 0), compared.serial
            if self._sent.get(device) == which:
                continue
            secret = np.zeros((2, len(compared.chunks)), "<u8")
            if base is not None:
                self._bases = dict([*self._bases.items()][-_BASES:]) | {base.id: base.chunks}
                found = [base.chunks.second_of(draft(info, 0)) for info in compared.chunks]
                secret[0], secret[1] = [one & _LOW for one in found], [one >> 64 for one in found]
            self._sent[device] = which
            self._connection.send(BaseDigests(device, compared.serial, which[0], secret.tobytes()))

    def _end(self, attempt: NodeAttempt, message: EndSave) -> None:
        attempt.stalled(message.stall)
        attempt.rounded(message.rounded)
        attempt.compare(self._opening.rank, self._replicas, message.digests)
        # Everything that the save needs is in memory of this process now: the ring, and slots of device memory with
        # ``process="node"``. Not sent after ``finished``, which waits for the coordinator.
        self._connection.post(SaveStaged(message.save))
        if self._coder is not None:
            self._coder.end(attempt)
        else:
            attempt.finished(self._opening.rank)
        self._attempt = None

    def _gpu_coder(self, ring: Ring) -> NodeEncoder | None:
        """Load torch, and return what codes on this node's GPUs; None, with a warning, if they are missing."""
        try:
            from ..gpu.node_mode.node_encoder import NodeEncoder

            return NodeEncoder(ring, self._opening.rank, self._connection.send)
        except ImportError as error:
            self._log.warning("the node worker cannot code on GPUs: %s", error)
            return None

    def _ask(self, question: DeviceQuestion) -> None:
        if self._coder is not None:
            self._coder.ask(question)
        else:
            problem = "the node worker cannot load torch; its log says why"
            self._connection.send(DeviceRefused(question.device, problem))

    def _tell_free(self, slots: list[int]) -> None:
        if slots:
            self._connection.post(SlotsFree(tuple(slots)))  # the thread may serve other processes, too, and this one may not read

    def _warn(self, save: int, text: str) -> None:
        self._connection.post(SaveWarning(save, text))

    def tell(self, save: int, outcome: Outcome, warnings: Sequence[str] = ()) -> None:
        """Report what became of a save, as ``_tell_free`` does."""
        if isinstance(outcome, RaystowError):
            self._connection.post(SaveLost.of(save, outcome))
        else:
            self._connection.post(SaveDone(save, outcome, tuple(warnings)))
