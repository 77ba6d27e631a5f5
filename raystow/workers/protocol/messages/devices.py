"""Between a training process and its node worker: chunks on GPUs, coded by either of them.

``device`` is CUDA's number of a GPU where the training process codes, and the GPU's UUID where the node worker does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....storage.limits import MAX_ROWS
from ..codec import Limit
from .staging import ChunkInfo

RunSpan = tuple[int, int, int, int]
"""A part of a run of bytes: its first byte in the run, slot, start in the slot, bytes."""


@dataclass(frozen=True)
class CodedLayout:
    """The chunks of a device that a training process codes on its GPU, in the order in which they are read. Sent once; the saves
    that follow only tell where the bytes are. See ``shm.coded_layout``.

    Args:
        nbytes: Raw bytes of each chunk.
        streams: Bytes of a plane in each of its coded streams; 0 for a chunk that is stored raw.
        starts: Where the lowest plane of each chunk starts in its batch.
        planes: Bit mask of the planes of each chunk that are coded.
        batches: Of each batch the first chunk, the one after its last, and the bytes of its lowest planes.
    """

    device: int
    chunks: Annotated[tuple[ChunkInfo, ...], Limit(MAX_ROWS)]
    nbytes: tuple[int, ...]
    streams: tuple[int, ...]
    starts: tuple[int, ...]
    planes: tuple[int, ...]
    batches: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ComparedChunks:
    """The chunks of a device that a training process may compare with an earlier version. Sent once; ``serial`` numbers them."""

    device: int
    serial: int
    chunks: Annotated[tuple[ChunkInfo, ...], Limit(MAX_ROWS)]


@dataclass(frozen=True)
class ChunkDigests:
    """Digest pairs of some compared chunks as they are in this save (see ``storage.coding.digest.digest_pair``).

    Args:
        base: The version of ``BaseDigests`` that they were compared with; 0 for none.
        numbers: int64 [chunks], which of the compared chunks these are.
        pairs: uint64 [2, chunks].
        same: A byte for each chunk: 1 if the base has the same bytes, so that none will be sent.
    """

    device: int
    serial: int
    base: int
    numbers: Annotated[bytes, Limit(8 * MAX_ROWS)]
    pairs: Annotated[bytes, Limit(16 * MAX_ROWS)]
    same: Annotated[bytes, Limit(MAX_ROWS)]


@dataclass(frozen=True)
class BaseDigests:
    """What chunks may refer to. ``pairs``: uint64 [2, chunks], those of all compared chunks in version ``base``; a second number
    of 0 says that it has no such chunk."""

    device: int
    serial: int
    base: int
    pairs: Annotated[bytes, Limit(16 * MAX_ROWS)]


@dataclass(frozen=True)
class BatchBytes:
    """Where the planes of a batch are that were not coded.

    Args:
        number: The batch.
        sums: int64 for each chunk, its digest before ``finish``.
        runs: The spans of each run of bytes.
        lows: For each chunk the run of its lowest plane, the start in it, and whether the plane is packed; empty if all lowest
            planes are in the first run as they were, or are coded.
    """

    number: int
    sums: bytes
    runs: tuple[tuple[RunSpan, ...], ...]
    lows: tuple[tuple[int, int, bool], ...] = ()


@dataclass(frozen=True)
class CodedPlanes:
    """Where planes are that were coded together. ``lengths``: int32, bytes of each stream."""

    spans: tuple[RunSpan, ...]
    lengths: bytes
    codec: str


@dataclass(frozen=True)
class CodedBatches:
    """Batches whose bytes are all in the ring, and their coded ``planes``, if any."""

    batches: tuple[BatchBytes, ...]
    planes: CodedPlanes | None = None


@dataclass(frozen=True)
class StageCoded:
    """Chunks that are coded on a GPU."""

    device: int
    arrived: tuple[CodedBatches, ...]


@dataclass(frozen=True)
class OpenDevice:
    """Asks for a ring in the memory of a device, and for a codec for it."""

    device: str
    codec: str


@dataclass(frozen=True)
class DeviceOpened:
    """The answer: the CUDA IPC handle of the ring, in hexadecimal, and its size."""

    device: str
    handle: str
    slots: int
    slot_size: int


@dataclass(frozen=True)
class CheckDevice:
    """The signature that the training process reads in the ring."""

    device: str
    seen: str


@dataclass(frozen=True)
class DeviceChecked:
    """The answer: it is what the node worker has written."""

    device: str


@dataclass(frozen=True)
class LendSlots:
    """Leaves the slots of the ring in host memory to the node worker, from slot ``first`` on."""

    device: str
    first: int


@dataclass(frozen=True)
class DeviceReady:
    """The answer: the codec of chunks on this device, and why."""

    device: str
    codec: str
    why: str


@dataclass(frozen=True)
class DeviceRefused:
    """The answer to any of the questions above: the node worker cannot code on this device."""

    device: str
    problem: str


@dataclass(frozen=True)
class DeviceChunk:
    """A chunk in a slot of device memory, from byte ``start``. ``sum``: its digest before ``finish``."""

    info: ChunkInfo
    start: int
    nbytes: int
    planes: tuple[int, ...]
    sum: int


@dataclass(frozen=True)
class StageOnDevice:
    """Chunks in a slot of device memory, to be coded by the node worker."""

    device: str
    slot: int
    chunks: Annotated[tuple[DeviceChunk, ...], Limit(MAX_ROWS)]


@dataclass(frozen=True)
class DeviceSlotFree:
    """The training process may fill this slot of device memory again."""

    device: str
    slot: int


DeviceQuestion = OpenDevice | CheckDevice | LendSlots


DeviceAnswer = DeviceOpened | DeviceChecked | DeviceReady | DeviceRefused | DeviceSlotFree
