"""Encodes recorded tensors in device memory, by the encoder that saves use.

float32 gradients whose values are bfloat16 values times one number are replaced by these values first, in place: the tensors are
copies. Neighbors in memory are examined together, by few kernels, because each launch takes time from the training's thread.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...storage.coding import dtypes
from ...storage.coding.chunk import DEFLATE
from ...storage.coding.kernels import Bytes
from ...workers.gpu.encode.encoder import Encoder
from ...workers.gpu.encode.pinned_ring import PinnedRing
from ...workers.gpu.encode.stages import Arrived
from ...workers.gpu.encode_request import EncodeRequest
from ...workers.protocol.messages import ChunkInfo, CodedPart, RecordedTensor
from ...workers.shm.coded_layout import CodedChunk, Layout
from ...workers.shm.ring import DEVICE_SLOT, Ring
from .gradient_coding import Recorded, TensorEncoder, coded_part, divided, dtype_name, factors, sampled

_RING = 8 * DEVICE_SLOT
_MEMORY = 512 << 20  # device memory of the encoder
_PIECE = 16 << 20  # raw bytes of a part
_EXAMINED = 64 << 20  # elements that are examined together, unless one tensor has more
_SMALL = 64 << 10  # bytes; smaller tensors are encoded on the CPU, in one copy


@dataclass(frozen=True, eq=False)
class GradientPiece:
    """A part of a tensor in device memory: a ``Source``. ``name``: its number."""

    name: str
    words: torch.Tensor
    kind: str

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.dtype(self.kind)

    @property
    def nbytes(self) -> int:
        nbytes: int = self.words.numel() * self.words.itemsize
        return nbytes

    @property
    def origin(self) -> int | None:
        address: int = self.words.data_ptr()
        return address

    @property
    def address(self) -> int | None:
        return self.origin

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.dtype.width - 1,)

    @property
    def followed(self) -> str:
        return ""

    @property
    def identity(self) -> object:
        return self.name, self.kind, self.nbytes

    def describe(self) -> ChunkInfo:
        shape = (self.words.numel(),)
        return ChunkInfo(self.name, self.name, "tensor", self.kind, shape, "journal", (0,), shape)

    def gather(self) -> torch.Tensor:
        return self.words


@dataclass
class Examined:
    """A tensor, and what is encoded of it. ``values``: float32 values replaced by bfloat16 ones."""

    tensor: torch.Tensor
    kind: str = "plain"
    factor: float = 1.0
    values: torch.Tensor | None = None
    parts: list[CodedPart] = field(default_factory=list)
    stored: list[Bytes] = field(default_factory=list)

    @property
    def record(self) -> Recorded:
        """The record of the tensor, once its parts have arrived."""
        name, shape = dtype_name(self.tensor.dtype), tuple(self.tensor.shape)
        return Recorded(RecordedTensor(self.kind, name, shape, self.factor, tuple(self.parts)), self.stored)  # type: ignore[arg-type]


class GpuGradientEncoder:
    """Encodes tensors of one GPU. For one thread."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._ring, self._free = Ring.create(_RING, DEVICE_SLOT), queue.SimpleQueue[int]()
        for slot in range(self._ring.slots):
            self._free.put(slot)
        self._pinned = PinnedRing(self._ring, take=self._take, release=self._free.put)
        self._encoder = Encoder(self._device, DEFLATE, self._pinned, size=_MEMORY)
        self._host = TensorEncoder()
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
        self._factor = 1.0
        self._replaced: list[torch.Tensor] = []
        self._pieces: tuple[object, list[GradientPiece]] = (None, [])
        self._layout: tuple[object, Layout | None] = (None, None)
        self._arena, self._used = np.empty(0, np.uint8), 0

    def encode(self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event) -> list[Recorded]:
        """Return the records of tensors, which are there after the event ``ready``. They may be overwritten. The stored bytes
        are valid until the next call."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            large = [place for place, one in enumerate(tensors) if one.numel() * one.itemsize > _SMALL]
            found: dict[int, Recorded] = {}
            for place, copied in self._to_host([(place, one) for place, one in enumerate(tensors) if place not in {*large}]):
                found[place] = self._host.encode(copied)
            examined = [Examined(tensors[place]) for place in large]
            self._examine(examined)
            self._encode([one for one in examined if one.kind != "zero"], self._stream.record_event())
            for values in self._replaced:  # also what is between the tensors
                values.zero_()
            self._replaced.clear()
            self._stream.synchronize()
        found.update({place: one.record for place, one in zip(large, examined, strict=True)})
        return [found[place] for place in range(len(tensors))]

    def close(self) -> None:
        """Free all memory."""
        self._encoder.close()
        self._pinned.close()
        self._ring.close()

    def _take(self) -> int | None:
        try:
            return self._free.get(timeout=0.001)
        except queue.Empty:
            return None

    def _to_host(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
        """Copy small tensors to host memory, by one copy for all."""
        if not tensors:
            return
        raw = torch.cat([one.reshape(-1).view(torch.uint8) for _, one in tensors]).cpu()
        parts = raw.split([one.numel() * one.itemsize for _, one in tensors])
        for (place, one), part in zip(tensors, parts, strict=True):
            yield place, part.clone().view(one.dtype).reshape(one.shape)

    def _examine(self, examined: list[Examined]) -> None:
        """Find tensors that are zero, and float32 tensors that can be stored as bfloat16 values."""
        if not examined:
            return
        norms = torch.stack(torch._foreach_norm([one.tensor for one in examined], ord=float("inf"))).cpu().tolist()
        for one, norm in zip(examined, norms, strict=True):
            if norm == 0.0 and not bool(one.tensor.reshape(-1).view(torch.uint8).any()):
                one.kind = "zero"
        singles = [one for one in examined if one.tensor.dtype == torch.float32 and one.kind != "zero"]
        for group in _neighbors(singles):
            self._replace(group)

    def _replace(self, group: list[Examined]) -> None:
        """Replace the values of tensors that follow each other in memory, all together or one by one."""
        if self._divide(group) or len(group) == 1:
            return
        for one in group:
            self._divide([one])

    def _divide(self, group: list[Examined]) -> bool:
        values = _covering(group)
        words = values.view(torch.int32)
        for factor in self._factors(group[0].tensor):
            quotients = (values / factor).to(torch.bfloat16)
            products = quotients.to(torch.float32).mul_(factor)
            same = bool((products.view(torch.int32) == words).all())
            del products
            if not same:
                continue
            self._factor = factor
            start = group[0].tensor.storage_offset()
            target = values.view(torch.bfloat16)[: quotients.numel()].copy_(quotients)
            self._replaced.append(values)
            for one in group:
                at = one.tensor.storage_offset() - start
                one.kind, one.factor = ("bfloat16" if factor == 1.0 else "scaled"), factor
                one.values = target[at : at + one.tensor.numel()]
            return True
        return False

    def _factors(self, tensor: torch.Tensor) -> Iterator[float]:
        """The factors that fit a sample of a tensor, the one of other tensors first."""
        sample = sampled(tensor.reshape(-1).view(torch.int32)).cpu()
        values = sample.view(torch.float32)
        for factor in dict.fromkeys((self._factor, 1.0, *factors(sample))):
            if divided(values, factor) is not None:
                yield factor

    def _encode(self, examined: Sequence[Examined], ready: torch.cuda.Event) -> None:
        pieces, owners = self._cut(examined)
        if not pieces:
            return
        coded: dict[int, CodedChunk] = {}
        copied: dict[int, Bytes] = {}
        self._reserve(sum(piece.nbytes for piece in pieces) + len(pieces))

        def emit(arrived: list[Arrived]) -> None:
            plan = self._encoder.plan
            assert plan is not None
            if plan is not self._layout[0]:
                self._layout = plan, Layout(plan.layout(self._device.index, pieces))
            layout = self._layout[1]
            assert layout is not None
            for one in arrived:
                for chunk in layout.chunks(one.message):
                    number = int(chunk.info.name)
                    coded[number], copied[number] = chunk, self._copied(chunk)
            self._pinned.announced(run for one in arrived for run in one.runs)

        try:
            self._encoder.encode(EncodeRequest(pieces, ready, lambda: None), emit)
            self._pinned.end()
        except BaseException:
            self._pinned.abandon()
            raise
        for number, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
            chunk = coded[number]
            owner.parts.append(coded_part(chunk.coding, piece.nbytes, chunk.digest))
            owner.stored.append(copied[number])

    def _cut(self, examined: Sequence[Examined]) -> tuple[list[GradientPiece], list[Examined]]:
        """Cut tensors into parts; the same list as before if they are the same, so that the encoder reuses its plan."""
        pieces, owners = list[GradientPiece](), list[Examined]()
        for one in examined:
            words = one.tensor.reshape(-1) if one.values is None else one.values
            kind = dtype_name(words.dtype)
            for part in words.split(_PIECE // words.itemsize):
                pieces.append(GradientPiece(str(len(pieces)), part, kind))
                owners.append(one)
        key = [(piece.kind, piece.address, piece.nbytes) for piece in pieces]
        if self._pieces[0] != key:
            self._pieces = key, pieces
        return self._pieces[1], owners

    def _reserve(self, nbytes: int) -> None:
        self._used = 0
        if self._arena.size < nbytes:
            self._arena = np.empty(nbytes, np.uint8)

    def _copied(self, chunk: CodedChunk) -> Bytes:
        """Copy a chunk out of the ring, into memory whose pages are there from the entry before."""
        start = self._used
        for slot, at, size in chunk.parts:
            self._arena[self._used : self._used + size] = self._ring.slot(slot)[at : at + size]
            self._used += size
        return self._arena[start : self._used]


def _neighbors(examined: Sequence[Examined]) -> Iterator[list[Examined]]:
    """Tensors of one storage in the order of their memory, in groups."""

    def place(one: Examined) -> tuple[int, int]:
        return one.tensor.untyped_storage().data_ptr(), one.tensor.storage_offset()

    group = list[Examined]()
    for one in sorted(examined, key=place):
        first = group[0] if group else one
        size = one.tensor.storage_offset() + one.tensor.numel() - first.tensor.storage_offset()
        if group and (place(first)[0] != place(one)[0] or size > _EXAMINED):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _covering(group: Sequence[Examined]) -> torch.Tensor:
    """All float32 elements from the first to the last tensor of a group."""
    first, last = group[0].tensor, group[-1].tensor
    size = last.storage_offset() + last.numel() - first.storage_offset()
    return torch.as_strided(first, (size,), (1,), first.storage_offset())
