"""Between a training process and its node worker: a save, through the staging ring."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ....state.chunk_info import ChunkInfo as ChunkInfo
from ....state.chunk_info import DerivedChunk as DerivedChunk
from ....state.chunk_info import RangeInfo
from ....storage.coding.rounded import Rounded
from ....storage.errors import Fenced, OutcomeUnknown, RaystowError, ReplicasDiffer, SaveFailed
from ....storage.format.root import Entry
from ....storage.limits import MAX_NAME
from ....storage.stores.settings import StoreAddress
from ..codec import Column, Digest, JsonText, Message, MessagePart, Packed, Secret, Table, Text, WorldSize
from .coordinator import RankSaveRequest, SaveContents
from .incarnation import Incarnation

Values = Column[tuple[Text, Text, JsonText]]
"""Plain values of a state: name, path, JSON text."""


class OpenSession(Message, frozen=True):
    """The first message of a training process.

    Args:
        ring: Bytes of the staging ring.
        slot: Bytes of each of its slots.
        coded: Bytes that the node may use for coded chunks of this rank.
        cache: Bytes of the node's memory for the newest version; None leaves that to the node.
        replicas: Other nodes that keep a copy of the newest version in memory.
        replication_rate: Bytes per second that the node may send to them; None sets no limit.
        process: Which process codes chunks on a GPU.
        keep: Bytes of versions that may stay in the ring, as a part of the node's memory for them.
        place: See ``StoreSettings``.
        part: See ``JoinRun``.
    """

    uri: Text
    repository: Text
    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    pid: int
    ring: int
    slot: int
    coded: int
    cache: int | None = None
    replicas: int = 0
    replication_rate: float | None = None
    process: Literal["training", "node"] = "training"
    keep: int = 0
    place: Text = ""
    part: Text = ""

    @property
    def store(self) -> StoreAddress:
        """The store of the repository."""
        return StoreAddress(self.uri, self.place)


class SessionOpened(Message, frozen=True):
    """The answer, sent with the descriptor of the ring. ``store_rate``: bytes per second that the store has taken, 0 if
    unknown. ``secret``: of the node worker's keys for digests (``storage.coding.digest.SecretKeys``). It is in no other message,
    and not in the ``repr``. ``kept``: see ``Ring``."""

    slots: int
    slot_size: int
    store_rate: float
    secret: Secret
    kept: int = 0

    def __repr__(self) -> str:
        return f"SessionOpened({self.slots}, {self.slot_size}, {self.store_rate}, kept={self.kept})"


class BeginSave(Message, frozen=True):
    """A training process begins a save, of so many ``chunks``, whose names and paths have at least ``text`` characters. ``raw``:
    whether the node worker may store floating-point tensors in host memory without coding."""

    request: RankSaveRequest
    contents: SaveContents
    values: Values
    chunks: int = 0
    text: int = 0
    raw: bool = False


class RawChunk(MessagePart, frozen=True):
    """A chunk in a slot of the ring, to be coded by the node worker."""

    info: ChunkInfo
    slot: int
    start: int
    nbytes: int


class StageRaw(Message, frozen=True):
    """Chunks in host memory."""

    chunks: Column[RawChunk]


class StageDerived(Message, frozen=True):
    """Chunks that follow from others of the same rank."""

    chunks: Column[DerivedChunk]


class SlotsFilled(Message, frozen=True):
    """No more chunks will be announced in these slots of the ring."""

    slots: Column[int]


class FlushPacks(Message, frozen=True):
    """The ring is full: upload packs that are not full yet, so that slots become free."""


class AbortSave(Message, frozen=True):
    """The training process cannot stage the save."""

    reason: Text


class DescribeReplicas(Message, frozen=True):
    """The groups that ``EndSave`` has digests of from now on. ``anew``: those described before are not used any more."""

    groups: Table[Digest, Column[RangeInfo]]
    anew: bool = False


class EndSave(Message, frozen=True):
    """All chunks of the save are announced.

    Args:
        stall: Seconds for which the save has held up the training; None if unknown.
        rounded: What rounding has done to tensors, by name.
        digests: Of the groups that the rank compares (see ``state.replica_groups``), by key: those of the ranges, uint64, and
            then those of their first elements.
    """

    save: int
    stall: float | None
    rounded: Table[Text, Rounded]
    digests: Table[Digest, Packed] = {}


class SlotsFree(Message, frozen=True):
    """The training process may fill these slots of the ring again; with ``device``, of the ring in the memory of that GPU."""

    slots: Column[int]
    device: Text = ""


class AttemptJoined(Message, frozen=True):
    """A save has joined an attempt. It is sent before anything of the save is reported to the coordinator. ``trace``: of the
    ticket."""

    save: int
    id: int
    attempt: Text
    trace: Text = ""


class SaveStaged(Message, frozen=True):
    """The node worker has all of a save, and completes it also if the training process ends."""

    save: int


class SaveDone(Message, frozen=True):
    """A save is a version."""

    save: int
    entry: Entry
    warnings: Column[Text] = ()


class SaveWarning(Message, frozen=True):
    """A save that is not over has a problem."""

    save: int
    text: Text


_Lost: TypeAlias = Literal["failed", "differ", "unknown", "fenced"]
_LOST: dict[_Lost, type[RaystowError]] = {
    "differ": ReplicasDiffer,
    "failed": SaveFailed,
    "unknown": OutcomeUnknown,
    "fenced": Fenced,
}


class SaveLost(Message, frozen=True):
    """A save has ended without a version, as far as the node worker knows: the fields of its error.

    Args:
        kind: "failed": it will not be a version. "differ": nor will it, since ranks hold other bits of the same tensor.
            "unknown": it may be one. "fenced": another run has taken over.
    """

    save: int
    what: Text
    subject: Text
    remedy: Text
    kind: _Lost = "failed"

    @staticmethod
    def of(save: int, error: RaystowError) -> SaveLost:
        """The message for an error."""
        kind: _Lost = next((kind for kind, of in _LOST.items() if isinstance(error, of)), "failed")
        return SaveLost(save, error.what[:MAX_NAME], error.subject[:MAX_NAME], error.remedy[:MAX_NAME], kind)

    @property
    def error(self) -> RaystowError:
        """The error."""
        return _LOST[self.kind](self.what, subject=self.subject, remedy=self.remedy)
