"""Between a training process and its node worker: a save, through the staging ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ....storage.coding.rounded import Rounded
from ....storage.format.root import Entry
from ....storage.limits import MAX_ROWS
from ..codec import Limit, Unsigned
from .coordinator import Begin

Values = Annotated[tuple[tuple[str, str, Annotated[str, Limit(96 << 20)]], ...], Limit(MAX_ROWS)]
"""Plain values of a state: name, path, JSON text."""


@dataclass(frozen=True)
class OpenSession:
    """The first message of a training process.

    Args:
        ring: Bytes of the staging ring.
        slot: Bytes of each of its slots.
        coded: Bytes that the node may use for coded chunks of this rank.
        cache: Bytes of the node's memory for the newest version; None leaves that to the node.
        replicas: Other nodes that keep a copy of the newest version in memory.
        replication_rate: Bytes per second that the node may send to them; None sets no limit.
        process: Which process codes chunks on a GPU.
    """

    uri: str
    repository: str
    rank: int
    world_size: int
    incarnation: str
    pid: int
    ring: int
    slot: int
    coded: int
    cache: int | None = None
    replicas: int = 0
    replication_rate: float | None = None
    process: Literal["training", "node"] = "training"


@dataclass(frozen=True)
class SessionOpened:
    """The answer, sent with the descriptor of the ring. ``store_rate``: bytes per second that the store has taken, 0 if
    unknown."""

    slots: int
    slot_size: int
    store_rate: float


@dataclass(frozen=True)
class BeginSave:
    """A training process begins a save."""

    begin: Begin
    values: Values


@dataclass(frozen=True)
class ChunkInfo:
    """The fields of a chunk's manifest row that are known before the chunk is coded."""

    name: str
    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    group: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class RawChunk:
    """A chunk in a slot of the ring, to be coded by the node worker."""

    info: ChunkInfo
    slot: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class DerivedChunk:
    """A chunk that is not stored, since it follows from another one: see ``storage.coding.derived``."""

    info: ChunkInfo
    source: str
    source_dtype: str
    digest: Annotated[int, Unsigned()]


@dataclass(frozen=True)
class StageRaw:
    """Chunks in host memory."""

    chunks: Annotated[tuple[RawChunk, ...], Limit(MAX_ROWS)]


@dataclass(frozen=True)
class StageDerived:
    """Chunks that follow from others of the same rank."""

    chunks: Annotated[tuple[DerivedChunk, ...], Limit(MAX_ROWS)]


@dataclass(frozen=True)
class SlotFilled:
    """No more chunks will be announced in this slot of the ring."""

    slot: int


@dataclass(frozen=True)
class FlushPacks:
    """The ring is full: upload packs that are not full yet, so that slots become free."""


@dataclass(frozen=True)
class AbortSave:
    """The training process cannot stage the save."""

    reason: str


@dataclass(frozen=True)
class EndSave:
    """All chunks of the save are announced.

    Args:
        stall: Seconds for which the save has held up the training; None if unknown.
        rounded: What rounding has done to tensors, by name.
    """

    save: int
    stall: float | None
    rounded: Mapping[str, Rounded]


@dataclass(frozen=True)
class SlotFree:
    """The training process may fill this slot of the ring again."""

    slot: int


@dataclass(frozen=True)
class SaveDone:
    """A save is a version."""

    save: int
    entry: Entry
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveLost:
    """A save will not be a version: the fields of its ``SaveFailed``."""

    save: int
    what: str
    subject: str
    remedy: str
