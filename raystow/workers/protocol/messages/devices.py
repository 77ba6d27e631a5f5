"""Between a training process and its node worker: chunks on GPUs, coded by either of them.

``device`` is CUDA's number of a GPU where the training process codes, and the GPU's UUID where the node worker does.
"""

from __future__ import annotations

from ..codec import Column, Message, MessagePart, Packed, Text
from .coordinator import Acknowledged
from .staging import ChunkInfo, SlotsFree

RunSpan = tuple[int, int, int, int]
"""A part of a run of bytes: its first byte in the run, slot, start in the slot, bytes."""


class CodedLayout(Message, frozen=True):
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
    chunks: Column[ChunkInfo]
    nbytes: Column[int]
    streams: Column[int]
    starts: Column[int]
    planes: Column[int]
    batches: Column[tuple[int, int, int]]


class ComparedChunks(Message, frozen=True):
    """The chunks of a device that a training process may compare with an earlier version. Sent once; ``serial`` numbers them."""

    device: int
    serial: int
    chunks: Column[ChunkInfo]


class ChunkDigests(Message, frozen=True):
    """Digests of some compared chunks as they are in this save (see ``storage.coding.digest.digest_pair``).

    Args:
        base: The version of ``BaseDigests`` that they were compared with; 0 for none.
        numbers: int64 [chunks], which of the compared chunks these are.
        digests: uint64 [chunks], ``raw_digest``.
        secret: uint64 [2, chunks], the lower and upper half of the second number, with the keys of ``SessionOpened``.
        same: A byte for each chunk: 1 if the base has the same bytes, so that none will be sent.
    """

    device: int
    serial: int
    base: int
    numbers: Packed
    digests: Packed
    secret: Packed
    same: Packed


class BaseDigests(Message, frozen=True):
    """What chunks may refer to. ``secret``: as that of ``ChunkDigests``, of all compared chunks as they are in version ``base``;
    0 if it has no such chunk."""

    device: int
    serial: int
    base: int
    secret: Packed


class BatchBytes(MessagePart, frozen=True):
    """Where the planes of a batch are that were not coded.

    Args:
        number: The batch.
        sums: int64 for each chunk, its digest before ``finish``.
        runs: The spans of each run of bytes.
        lows: For each chunk the run of its lowest plane, the start in it, and whether the plane is packed; empty if all lowest
            planes are in the first run as they were, or are coded.
    """

    number: int
    sums: Packed
    runs: Column[Column[RunSpan]]
    lows: Column[tuple[int, int, bool]] = ()


class CodedPlanes(MessagePart, frozen=True):
    """Where planes are that were coded together. ``lengths``: int32, bytes of each stream."""

    spans: Column[RunSpan]
    lengths: Packed
    codec: Text


class CodedBatches(MessagePart, frozen=True):
    """Batches whose bytes are all in the ring, and their coded ``planes``, if any.

    ``digests``: for each chunk the 32 bytes of its ``stored_digest``, or zeros if the receiver has to compute it; empty: of all.
    """

    batches: Column[BatchBytes]
    planes: CodedPlanes | None = None
    digests: Packed = b""


class StageCoded(Message, frozen=True):
    """Chunks that are coded on a GPU."""

    device: int
    arrived: Column[CodedBatches]


class OpenDevice(Message, frozen=True):
    """Asks for a ring in the memory of a device, and for a codec for it."""

    device: Text
    codec: Text


class DeviceOpened(Message, frozen=True):
    """The answer: the CUDA IPC handle of the ring, in hexadecimal, and its size."""

    device: Text
    handle: Text
    slots: int
    slot_size: int


class CheckDevice(Message, frozen=True):
    """The signature that the training process reads in the ring. The answer is ``Acknowledged`` if it is what the node worker has
    written."""

    device: Text
    seen: Text


class LendSlots(Message, frozen=True):
    """Leaves the slots of the ring in host memory to the node worker, from slot ``first`` on."""

    device: Text
    first: int


class DeviceReady(Message, frozen=True):
    """The answer: the codec of chunks on this device, and why."""

    device: Text
    codec: Text
    why: Text


class DeviceRefused(Message, frozen=True):
    """The answer to any of the questions above: the node worker cannot code on this device."""

    device: Text
    problem: Text


class DeviceChunk(MessagePart, frozen=True):
    """A chunk in a slot of device memory, from byte ``start``. ``sum``: its digest before ``finish``."""

    info: ChunkInfo
    start: int
    nbytes: int
    planes: Column[int]
    sum: int


class StageOnDevice(Message, frozen=True):
    """Chunks in a slot of device memory, to be coded by the node worker."""

    device: Text
    slot: int
    chunks: Column[DeviceChunk]


DeviceQuestion = OpenDevice | CheckDevice | LendSlots


DeviceAnswer = DeviceOpened | Acknowledged | DeviceReady | DeviceRefused | SlotsFree
