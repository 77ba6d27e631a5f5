"""Saves: between ranks, node workers and the coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....storage.format.root import Entry
from ....storage.format.signature import PublicKey
from ....storage.format.version_record import FragmentInfo
from ....storage.retention.export_rule import Export
from ....storage.retention.policy import Policy
from ..codec import Column, CoordinatorRequest, Digest, JsonText, Message, MessagePart, Table, Text, WorldSize
from .incarnation import Incarnation as Incarnation

OnFenced = Literal["raise", "takeover"]

COMMIT = 60.0
"""Seconds that a commit takes, or the choice of a version."""


class Acknowledged(Message, frozen=True):
    """The answer to a request that asks for nothing."""


class RanksWarning(Message, frozen=True):
    """The answer while the coordinator waits for other ranks: send the request again.

    Args:
        number: Of the warning, among those of the attempt or of the restore. The next request has it as ``last_warning``.
        text: Ranks that are late, or have other metrics; empty if there is no warning.
    """

    number: int = 0
    text: Text = ""


class Ticket(Message, frozen=True):
    """The attempt that a save belongs to.

    Args:
        node: Number of the node in the attempt.
        timeout: Seconds until the coordinator gives the attempt up.
        base: A version that chunks are compared with: unchanged ones refer to it.
        deltas: Whether other chunks may be deltas to it.
    """

    id: int
    attempt: Text
    node: int
    timeout: float
    step: int
    base: Entry | None = None
    deltas: bool = False


MAX_EXPORT_FILE = 64 << 20
"""Bytes of a config or tokenizer file."""

FileBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_EXPORT_FILE)]


class ExportOrder(MessagePart, frozen=True):
    """Which versions to export, and the config and tokenizer files of rank 0 by name."""

    export: Export
    files: Table[Text, FileBytes] = {}


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
        export: Of rank 0, if versions are exported.
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
    export: ExportOrder | None = None


class SaveContents(MessagePart, frozen=True):
    """What the plan of a save says of the rank's tensors.

    Args:
        replicated: Coverage sum of the tensors that every rank must hold alike (see ``state.coverage``).
        expected: Coverage sum of the tensors of which this rank is the first holder.
        owned_dtensors: Names of the DTensors of which this rank is the first holder.
        plain_tensors: Names, dtypes and shapes of the tensors that every rank must hold alike, if other ones than in the rank's
            save before; they are used for an error only.
        coding: See ``format.version_record``.
    """

    replicated: Digest
    expected: Digest
    owned_dtensors: Column[Text] = ()
    plain_tensors: Column[Text] = ()
    coding: Table[Text, Text] = {}


class Begin(CoordinatorRequest[Ticket], frozen=True):
    """A rank of ``node`` begins a save."""

    node: Text
    request: RankSaveRequest
    contents: SaveContents


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
    """A process has taken up a rank."""

    rank: int
    incarnation: Incarnation
    world_size: WorldSize


class RankFinished(CoordinatorRequest[Acknowledged], frozen=True):
    """All shards of a rank are coded; ``covered`` is their part of the coverage sum."""

    ticket: Ticket
    rank: int
    covered: Digest


class AwaitRanks(CoordinatorRequest[Acknowledged], frozen=True):
    """Asks for an answer when every rank of the attempt has finished. ``last_warning``: the number of the last one."""

    ticket: Ticket
    last_warning: int = 0

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
    """At ``step`` all ranks save, or ask again. Before it no step is saved."""

    step: int
    save: bool


class AskNextSave(CoordinatorRequest[NextSave], frozen=True):
    """A rank asks for the next step, from ``first`` on, at which it saves or asks again.

    Args:
        seconds: From save to save; None: the interval that loses the least time.
        mtbf: Mean seconds between failures; None: as observed.
        budget: The largest share of the time that saves may take.
        on_fenced: See ``RankSaveRequest``.
        node: The rank's.
        requested: Whether a save was requested on this rank, and no step was due since.
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


class FindOutcome(CoordinatorRequest[Committed], frozen=True):
    """Asks what has become of an attempt, once it is over."""

    id: int
    attempt: Text


class RankDisconnected(CoordinatorRequest[Acknowledged], frozen=True):
    """The process of a rank has ended."""

    rank: int
    incarnation: Incarnation
    reason: Text
