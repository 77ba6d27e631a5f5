"""Saves: between ranks, node workers and the coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....state.chunk_info import RangeInfo as RangeInfo
from ....storage.format.parts import is_part
from ....storage.format.root import Entry
from ....storage.format.signature import PublicKey
from ....storage.format.version_record import FragmentInfo
from ....storage.retention.export_rule import Export
from ....storage.retention.policy import Policy
from ..codec import Column, CoordinatorRequest, Digest, JsonText, Message, MessagePart, Packed, Table, Text, WorldSize
from .incarnation import Incarnation as Incarnation

OnFenced = Literal["raise", "takeover"]
OnDifference = Literal["warn", "raise"]


PARTS = 12_000
"""Parts of a group in one answer, which takes 48 KB."""

PLACEMENT = 0
"""The group in questions for what a rank stores of each tensor. ``parts`` of the answer: of the first tensors, by
``state.coverage.mark``, that number, what the rank's chunks count, and what the tensor does. ``ranges``: boxes of a tensor."""

COMMIT = 60.0
"""Seconds that a commit takes, or the choice of a version."""


class Acknowledged(Message, frozen=True):
    """An answer without content. Unless a message says what it means: the request was handled."""


class RanksWarning(Message, frozen=True):
    """The answer while the coordinator waits for other ranks: send the request again.

    Args:
        number: Of the warning, among those of the attempt or of the restore. The next request has it as ``last_warning``.
        text: Ranks that are late, or have other metrics; empty if there is no warning.
        to: Who logs it for all that wait: a node's number in the attempt, or a rank.
    """

    number: int = 0
    text: Text = ""
    to: int = 0


class Ticket(Message, frozen=True):
    """The attempt that a save belongs to.

    Args:
        node: Number of the node in the attempt.
        timeout: Seconds until the coordinator gives the attempt up.
        base: A version that chunks are compared with: unchanged ones refer to it.
        deltas: Whether other chunks may be deltas to it.
        trace: Of the save's span; see ``storage.runtime.spans``.
    """

    id: int
    attempt: Text
    node: int
    timeout: float
    step: int
    base: Entry | None = None
    deltas: bool = False
    trace: Text = ""


MAX_EXPORT_FILE = 64 << 20
"""Bytes of a config or tokenizer file."""

FileBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_EXPORT_FILE)]


class ExportOrder(MessagePart, frozen=True):
    """Which versions to export, and the config and tokenizer files of rank 0 by name."""

    export: Export
    files: Table[Text, FileBytes] = {}


class RequestExport(CoordinatorRequest[Acknowledged], frozen=True):
    """Asks for the exports that are due. Rank 0 sends it when it begins and when it ends: a coordinator may have died since a
    commit. The fields: see ``RankSaveRequest``."""

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    export: ExportOrder
    retention: Policy | None = None


NO_VERSION = "no version"


class RankSaveRequest(MessagePart, frozen=True):
    """What is known of a rank's ``save``-th save when it is called.

    Args:
        timeout: Seconds until the save is given up.
        metrics: Plain values, as ``storage.format.values`` stores them.
        lossy: See ``format.version_record``.
        retention: The policy to apply once this save is a version.
        delta: How many versions in a row may be stored as deltas to a whole one.
        on_fenced: What happens if another run has taken over the repository.
        provenance: Of rank 0 as in ``format.version_record``, of the others host and GPU only.
        notes: The user's, as ``metrics``.
        on_difference: What happens if ranks hold other bits of the same tensor.
        export: Of rank 0, if versions are exported.
        trace: Of the span in which ``save`` was called.
        parts: The names of those that the save needs besides the ranks, joined by commas: one text is decoded faster than many.
        cut: Of rank 0, as ``metrics``: for the parts.
        past: The round of restores in which the process has restored last, ``NO_VERSION`` if there was none to restore, or "" if
            it has not. What members with another past save is no version.
    """

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    save: int
    step: int
    timeout: float
    metrics: Table[Text, JsonText] = {}
    lossy: Table[Text, Text] = {}
    retention: Policy | None = None
    delta: int | Literal["auto"] = 0
    on_fenced: OnFenced = "raise"
    provenance: Table[Text, Text] = {}
    notes: Table[Text, JsonText] = {}
    on_difference: OnDifference = "warn"
    export: ExportOrder | None = None
    trace: Text = ""
    parts: Text = ""
    cut: Table[Text, JsonText] = {}
    past: Text = ""


class SaveContents(MessagePart, frozen=True):
    """What the plan of a save says of the rank's tensors.

    Args:
        replicated: Coverage sum of the tensors that every rank must hold alike (see ``state.coverage``).
        expected: Coverage sum of the tensors of which this rank is the first holder.
        owned_dtensors: Names of the DTensors of which this rank is the first holder.
        plain_tensors: Names, dtypes and shapes of the tensors that every rank must hold alike, and the tensors that they are
            tied to, if other ones than in the rank's save before. They are used for an error only.
        coding: See ``format.version_record``.
        nbytes: Of a part: the bytes of its tensors.
    """

    replicated: Digest
    expected: Digest
    owned_dtensors: Column[Text] = ()
    plain_tensors: Column[Text] = ()
    coding: Table[Text, Text] = {}
    nbytes: int = 0


class Begin(CoordinatorRequest[Ticket], frozen=True):
    """A rank or part of ``node`` begins a save. A part waits until a rank has."""

    node: Text
    request: RankSaveRequest
    contents: SaveContents

    @property
    def wait(self) -> float:
        return self.request.timeout if is_part(self.request.rank) else 0.0


class CoordinatorStarted(Message, frozen=True):
    """The repository of a coordinator. ``signed_by``: the keys with which it takes versions to be signed. ``epoch``, ``number``:
    of the ``Incarnation`` of the process that has called."""

    repository: Text
    signed_by: Column[PublicKey]
    epoch: int
    number: int


class StartRun(CoordinatorRequest[CoordinatorStarted], frozen=True):
    """A training process begins to use a coordinator. ``job``: Ray's id of its job."""

    job: Text
    on_fenced: OnFenced = "raise"


class JoinRun(CoordinatorRequest[Acknowledged], frozen=True):
    """A process has taken up a rank, or the ``part`` with the number ``rank``, whose world size means nothing."""

    rank: int
    incarnation: Incarnation
    world_size: WorldSize
    part: Text = ""


class RankFinished(CoordinatorRequest[Acknowledged], frozen=True):
    """All shards of a rank are coded; ``covered`` is their part of the coverage sum. ``digests``: the keys of the groups of
    ``state.replica_groups`` that it compares, with their digests."""

    ticket: Ticket
    rank: int
    covered: Digest
    digests: Column[tuple[Digest, Digest]] = ()


class ReplicaQuestion(MessagePart, frozen=True):
    """Asks for what a rank has reported of a group whose digests differ. ``ranges``: the numbers of the ranges to describe; empty
    to ask for digests of all."""

    rank: int
    group: Digest
    ranges: Column[int] = ()


class ReplicaQuestions(Message, frozen=True):
    """Asks a node to send its request again, with its answers."""

    questions: Column[ReplicaQuestion]


class DescribedRange(MessagePart, frozen=True):
    """A range of a group: its number, and the digests of all of it and of its first element."""

    number: int
    info: RangeInfo
    whole: Digest
    first: Digest


class ReplicaAnswer(MessagePart, frozen=True):
    """The answer to a question. ``count``: the ranges of the group; 0 if the node does not have them. ``parts``: for each of at
    most ``PARTS`` equal parts of the group, the lowest four bytes of a digest. ``ranges``: those of the question."""

    question: ReplicaQuestion
    count: int
    parts: Packed = b""
    ranges: Column[DescribedRange] = ()


class ReplicasCompared(Message, frozen=True):
    """What ranks hold differently, as texts."""

    differences: Column[Text]


class CompareReplicas(CoordinatorRequest[ReplicasCompared | ReplicaQuestions], frozen=True):
    """Reports what a rank holds after a restore, and then its answers. ``number``: of the comparison, among those of the process.
    ``digests``: see ``RankFinished``."""

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    number: int
    timeout: float
    digests: Column[tuple[Digest, Digest]] = ()
    answers: Column[ReplicaAnswer] = ()

    @property
    def wait(self) -> float:
        return self.timeout


class AwaitRanks(CoordinatorRequest[Acknowledged | ReplicaQuestions], frozen=True):
    """Asks for an answer when every rank of the attempt has finished. ``last_warning``: the number of the last one.
    ``answers``: of the node, to the questions that it got instead."""

    ticket: Ticket
    last_warning: int = 0
    answers: Column[ReplicaAnswer] = ()

    @property
    def wait(self) -> float:
        return self.ticket.timeout


class PartStaged(CoordinatorRequest[Acknowledged], frozen=True):
    """A node's packs and fragment are complete, in memory, and being uploaded."""

    ticket: Ticket
    fragment: FragmentInfo


class Committed(Message, frozen=True):
    """The entry of the version that an attempt has become."""

    entry: Entry


class PartStored(CoordinatorRequest[Committed], frozen=True):
    """A node's packs and fragment are durable. The answer comes when the attempt is a version.
    ``last_warning``: see ``AwaitRanks``."""

    ticket: Ticket
    fragment: FragmentInfo
    last_warning: int = 0

    @property
    def wait(self) -> float:
        return self.ticket.timeout + COMMIT


class PartFailed(CoordinatorRequest[Acknowledged], frozen=True):
    """A node cannot store its part of an attempt."""

    ticket: Ticket
    reason: Text


class FailureNoted(Message, frozen=True):
    """The answer to ``RankSaveFailed``. ``first``: no other rank has reported this save, so that this rank logs it for all."""

    first: bool


class RankSaveFailed(CoordinatorRequest[FailureNoted], frozen=True):
    """The training process of a rank has lost its ``save``-th save."""

    rank: int
    incarnation: Incarnation
    save: int
    step: int
    reason: Text


class NextSave(Message, frozen=True):
    """At ``step`` all ranks save, or ask again. Before it no step is saved. ``cut``: to a part, that of the save."""

    step: int
    save: bool
    cut: Table[Text, JsonText] = {}


class AskNextSave(CoordinatorRequest[NextSave], frozen=True):
    """A rank asks for the next step, from ``first`` on, at which it saves or asks again. A part is answered when rank 0 has begun
    to save such a step.

    Args:
        seconds: From save to save; None: the interval that loses the least time.
        mtbf: Mean seconds between failures; None: as observed.
        budget: The largest share of the time that saves may take.
        on_fenced: See ``RankSaveRequest``.
        node: The rank's.
        requested: Whether a save was requested on this rank, and no step was due since.
        timeout: Seconds that a part waits.
        saving: The steps of the part's saves that have not ended.
    """

    rank: int
    incarnation: Incarnation
    world_size: WorldSize
    first: int
    seconds: float | None = None
    mtbf: float | None = None
    budget: float | None = None
    on_fenced: OnFenced = "raise"
    node: Text = ""
    requested: bool = False
    timeout: float = 0.0
    saving: Column[int] = ()

    @property
    def wait(self) -> float:
        return self.timeout


class FindOutcome(CoordinatorRequest[Committed], frozen=True):
    """Asks what has become of an attempt, once it is over."""

    id: int
    attempt: Text


class RankDisconnected(CoordinatorRequest[Acknowledged], frozen=True):
    """The process of a rank has ended."""

    rank: int
    incarnation: Incarnation
    reason: Text
