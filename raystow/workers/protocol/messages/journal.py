"""The step journal: entries, and the messages between a training process, its node worker, other node workers and the
coordinator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from ....storage.limits import MAX_ROWS
from ....storage.runtime.clock import Clock
from ....storage.stores.settings import StoreAddress
from ..codec import (
    Column,
    CoordinatorRequest,
    Digest,
    DigestBytes,
    JsonText,
    Message,
    MessagePart,
    Packed,
    Shape,
    Text,
    WorldSize,
)
from .coordinator import COMMIT, Acknowledged
from .incarnation import Incarnation
from .reads import Span

START = -1
"""The step before the first one: the state that a training has built itself."""

STORE = "store"
"""What the store is called among the nodes that have an entry."""

JOURNAL = "journal/"
"""What the names of entries begin with; no object of a store has such a name."""

RECORDING = 0
"""Number of the shared memory through which new entries pass."""

MAX_ENTRY = 1 << 38
"""Bytes of an entry."""

_ROLLBACKS = re.compile(r"-r([0-9]{1,9})$")

EntrySize = Annotated[int, Meta(ge=0, le=MAX_ENTRY)]
"""Bytes of an entry."""


class Generation(MessagePart, frozen=True, order=True):
    """The entries that all ranks have recorded between two agreements on where to continue. Later generations are greater.

    Args:
        token: Its name on all ranks and in the store. Only this class composes and parses it.
        first: All steps from this one on are of this generation, or of a later one.
    """

    token: Text
    first: int

    @staticmethod
    def begun(first: int, clock: Clock, *, after: Generation | None = None, rollbacks: int = 0) -> Generation:
        """Begin a generation at step ``first``, which is greater than the one ``after`` which it comes, also if the clock was set
        back. ``rollbacks``: how many the repository has had."""
        token = f"{int(clock.now() * 1000):013x}-{clock.token()}"
        if after is not None and token <= after.token:
            token = f"{after.token}-{clock.token()}"
        return Generation(f"{token}-r{rollbacks}" if rollbacks else token, first)

    @property
    def rollbacks(self) -> int:
        """How many rollbacks the repository had had when the generation began."""
        found = _ROLLBACKS.search(self.token)
        return int(found[1]) if found else 0


class EntryInfo(MessagePart, frozen=True):
    """What is known of an entry without reading it.

    Args:
        step: Number of the step that it records.
        previous: The step whose state the entry starts from; ``START`` if there is none.
        lineage: The generations that the state comes from, oldest first; the last one is the entry's own.
        size: Bytes of the entry.
        digest: Of these bytes, once all of them are with the node worker of the rank. Whatever is read is compared with it. It
            comes through Ray, or in a sealed message (see ``tcp_channel``), and never with the bytes.
    """

    repository: Text
    rank: int
    world_size: WorldSize
    step: int
    previous: int
    lineage: Annotated[tuple[Generation, ...], Meta(min_length=1, max_length=MAX_ROWS)]
    size: EntrySize = 0
    digest: DigestBytes = b""

    @property
    def key(self) -> str:
        """Name of the entry in its repository's journal."""
        return f"{JOURNAL}{self.world_size}/{self.rank}/{self.step}-{self.generation.token}"

    @property
    def generation(self) -> Generation:
        """The generation that has recorded it."""
        return self.lineage[-1]

    def replaces(self, other: EntryInfo) -> bool:
        """Whether another entry of the rank was recorded by an attempt whose steps this one's generation has repeated."""
        newer = self.generation > other.generation and other.step > self.previous
        return newer and generation_of(self.lineage, other.step) != other.generation


def generation_of(lineage: Sequence[Generation], step: int) -> Generation | None:
    """The generation that recorded a step; None if the lineage does not reach back so far."""
    return next((generation for generation in reversed(lineage) if generation.first <= step), None)


class CodedPart(MessagePart, frozen=True):
    """A piece of a recorded tensor: the fields of its ``Coding``, and the digests of its ``nbytes`` raw bytes (``digest``) and of
    the stored ones (``stored_digest``), which begin at byte ``start`` of the entry."""

    nbytes: int
    digest: Digest
    stored_digest: DigestBytes
    planes: bool
    rotated: bool
    codecs: Annotated[tuple[Text, ...], Meta(max_length=16)]
    stored: Annotated[tuple[int, ...], Meta(max_length=16)]
    streams: Packed
    stream: int
    start: int


class RecordedTensor(MessagePart, frozen=True):
    """A tensor in an entry.

    Args:
        kind: "none": there is no tensor. "zero": all its bytes are zero. "plain": ``parts`` are its bytes. "bfloat16": its
            float32 values are those bfloat16 values. "scaled": each float32 value is a bfloat16 value times ``factor``.
        dtype: Element type of the tensor.
    """

    kind: Literal["none", "zero", "plain", "bfloat16", "scaled"]
    dtype: Text = ""
    shape: Shape = ()
    factor: float = 1.0
    parts: Column[CodedPart] = ()


class OptimizerStep(MessagePart, frozen=True):
    """One call of an optimizer's ``step``.

    Args:
        optimizer: Number of the optimizer.
        groups: Hyper-parameters of each parameter group; empty for a group that has not changed since the step before.
        gradients: In the order of the parameters of all groups.
        scale: What a gradient scaler has passed to a fused optimizer.
    """

    optimizer: int
    groups: Column[JsonText]
    gradients: Column[RecordedTensor]
    scale: JsonText = ""


class EntryHeader(Message, frozen=True):
    """The end of an entry, after the bytes of its tensors.

    Args:
        parent: Digest of the header of the entry before, if the same process has recorded it.
        groups: Hyper-parameters of the parameter groups of each optimizer after the step, as in ``OptimizerStep``: a scheduler
            may have set those of the next step.
        values: What the caller adds.
        module_values: What the model's state dict has besides parameters and buffers.
        buffers: Names and tensors of the model's buffers that have changed.
        before: Digests of all tensors of the state before the step; only in the first entry after a version.
        after: Digests of the state after the step.
        whole: Whether ``after`` covers every byte, and not only a sample.
        layout: The rank's parts of all parameters, only in the first entry after a version; empty if they are not each a ``Box``.
    """

    info: EntryInfo
    parent: DigestBytes
    steps: Column[OptimizerStep]
    groups: Column[Column[JsonText]]
    values: JsonText
    module_values: JsonText
    buffers: Column[tuple[Text, RecordedTensor]]
    before: Packed
    after: Packed
    whole: bool
    layout: Column[tuple[Shape, Shape]] = ()


class StoredEntry(MessagePart, frozen=True):
    """Where an entry is in the store: at byte ``start`` of the entries of ``rank`` in a segment."""

    number: int
    attempt: Text
    rank: int
    start: int


class SegmentTicket(Message, frozen=True):
    """What a rank is to store.

    Args:
        number: Of the segment, 0 if nothing is to be stored now.
        after: The step up to which the store has all entries already; ``START`` if it has none.
        step: The last step of the segment.
    """

    number: int
    attempt: Text
    after: int
    step: int


class OpenSegment(CoordinatorRequest[SegmentTicket], frozen=True):
    """A node can store a rank's entries up to ``newest``."""

    newest: EntryInfo


class SegmentStored(CoordinatorRequest[Acknowledged], frozen=True):
    """A rank's entries of a segment are durable, in one object. ``entries``: oldest first."""

    number: int
    attempt: Text
    rank: int
    entries: Column[EntryInfo]


class OpenJournal(Message, frozen=True):
    """The first message of a training process that records steps.

    Args:
        budget: Bytes of the node's memory for entries; None leaves that to the node.
        replicas: Other nodes that keep a copy of each entry.
        durable_every: Steps after which entries go to the store; 0 for never.
        place: See ``StoreSettings``.
    """

    uri: Text
    repository: Text
    rank: int
    replicas: int
    budget: int | None = None
    durable_every: int = 0
    place: Text = ""

    @property
    def store(self) -> StoreAddress:
        """The store of the repository."""
        return StoreAddress(self.uri, self.place)


class ShareMemory(Message, frozen=True):
    """Shares memory of ``size`` bytes, through which entries pass. Its descriptor comes with the message. A ``number`` that was
    shared before is other memory from then on; ``RECORDING`` is the ring in which new entries come."""

    number: Annotated[int, Meta(ge=0)]
    size: EntrySize


class BeginEntry(Message, frozen=True):
    """The bytes of a new entry follow, at most ``most``. One that was not kept is dropped, and so is all shared memory but
    ``RECORDING``. ``info``: without size and digest."""

    info: EntryInfo
    most: EntrySize


class AppendEntry(Message, frozen=True):
    """Hands over the next bytes of an entry, which are in the ring. They are needed there until ``SlotsFree`` answers
    ``SlotsFilled`` for their slot."""

    spans: Column[Span]


class KeepEntry(Message, frozen=True):
    """All bytes of an entry were handed over. The answer is ``EntryKept``. ``info``: without the digest."""

    info: EntryInfo


class EntryKept(Message, frozen=True):
    """What has become of an entry.

    Args:
        copies: Other nodes that have it.
        problem: Why it is not kept, or why all partners refuse a copy; empty if there is no problem.
        memory: Names the memory of a node that keeps a copy: a node worker that was restarted, or has dropped copies for entries
            of other trainings, has another one.
    """

    step: int
    copies: int
    problem: Text = ""
    memory: Text = ""


class SaveBegun(Message, frozen=True):
    """A save of the state after ``step`` is under way: a budget that is full may drop entries up to this step, as long as entries
    of ``generation`` are recorded."""

    step: int
    generation: Generation


class SaveWithdrawn(Message, frozen=True):
    """The save of the state after ``step``, which was announced by ``SaveBegun``, has failed: entries up to it are needed."""

    step: int


class FetchEntry(Message, frozen=True):
    """Asks for an entry, which the node keeps from then on. The answer is ``FetchedEntry``. ``memory``: number of the shared
    memory whose first bytes the entry becomes."""

    place: EntryPlace
    memory: int


class FetchedEntry(Message, frozen=True):
    """``problem``: why the entry could not be fetched; empty if it is in the shared memory."""

    problem: Text = ""


class PutEntry(Message, frozen=True):
    """Asks another node to keep a copy of an entry, which it reads from the node ``holder``. The answer is ``EntryKept``.
    ``oldest``: entries before it are not needed."""

    info: EntryInfo
    oldest: int
    holder: Text


class EntryPlace(MessagePart, frozen=True):
    """An entry to replay, the nodes that have it, and where it is in the store if that has it."""

    info: EntryInfo
    nodes: Column[Text]
    stored: StoredEntry | None = None


class JournalChoice(Message, frozen=True):
    """How far to replay.

    Args:
        step: The step that all ranks go to; the base if there is nothing to replay.
        lineage: Generations of the entries that are recorded from then on.
        entries: Those that the rank that asks needs, oldest first: its own, or of a step that another number of ranks has
            recorded those of all of them.
        agreed: All ranks have reached ``step``.
        end: Why later entries are not used; empty if there are none.
        trace: Of the replay's span; see ``storage.runtime.spans``.
    """

    step: int
    lineage: Column[Generation]
    entries: Column[EntryPlace] = ()
    agreed: bool = False
    end: Text = ""
    trace: Text = ""


class JournalVote(CoordinatorRequest[JournalChoice], frozen=True):
    """A rank asks how far to replay.

    Args:
        number: How many replays its process has begun.
        base: The step that the rank has restored; ``START`` without a version.
        reached: The last step that the rank has replayed, if it knows how far to go.
        timeout: Seconds to wait for other ranks that do not replay on.
        nothing: Nothing is to be replayed: the version was asked for by name.
        fixed: Why the rank cannot replay steps that another number of ranks has recorded; empty if it can.
        residues: A number of 64 bits for each step up to ``reached``; their sum over all ranks is 0 if the state after it is
            the recorded one: see ``ShardCheck``.
        error: Why the rank gives up.
        trace: Of the span in which the rank replays.
    """

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    number: int
    timeout: float
    base: int
    reached: int | None = None
    nothing: bool = False
    fixed: Text = ""
    residues: Packed = b""
    error: Text = ""
    trace: Text = ""

    @property
    def wait(self) -> float:
        return self.timeout + COMMIT
