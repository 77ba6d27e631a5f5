"""Encodes recorded tensors in device memory, by the encoder that saves use.

float32 gradients whose values are bfloat16 values times one number are replaced by these values first, in place: the tensors are
copies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...storage.coding import dtypes
from ...storage.coding.chunk import DEFLATE
from ...storage.coding.digest import stored_digest
from ...workers.gpu.encode.encoder import Encoder
from ...workers.gpu.encode.pinned_ring import PinnedRing
from ...workers.gpu.encode.stages import Arrived
from ...workers.gpu.encode_request import DeviceSource, EncodeRequest
from ...workers.gpu.kernels import bfloat16_kernels, copy_kernels
from ...workers.journal.entry_writer import EntryWriter
from ...workers.protocol.messages import ChunkInfo, CodedPart, RecordedTensor
from ...workers.shm.coded_layout import CodedChunk, Layout
from ...workers.shm.ring import Ring
from .gradient_coding import SMALL, coded_part, divided, dtype_name, factors, sampled, uncoded

_MEMORY = 768 << 20  # device memory of the encoder
_PIECE = 16 << 20  # raw bytes of a part
_SAMPLED, _SAMPLE = 4, 1024  # tensors and elements from which a factor is found


@dataclass(frozen=True, eq=False)
class GradientPiece(DeviceSource):
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
    def identity(self) -> object:
        return self.name, self.kind, self.nbytes

    def describe(self) -> ChunkInfo:
        shape = (self.words.numel(),)
        return ChunkInfo(self.name, self.name, "tensor", self.kind, shape, "journal", (0,), shape)


@dataclass
class Examined:
    """A tensor, and what is encoded of it. ``values``: float32 values replaced by bfloat16 ones."""

    tensor: torch.Tensor
    kind: str = "plain"
    factor: float = 1.0
    values: torch.Tensor | None = None
    parts: list[CodedPart] = field(default_factory=list)

    @property
    def record(self) -> RecordedTensor:
        """The record of the tensor, once its parts have arrived."""
        name, shape = dtype_name(self.tensor.dtype), tuple(self.tensor.shape)
        return RecordedTensor(self.kind, name, shape, self.factor, tuple(self.parts))  # type: ignore[arg-type]


class SharedRing:
    """The ring that all GPUs of this process copy entries to, one after the other. ``sink``: of the entry under way."""

    sink: EntryWriter | None

    def __init__(self, ring: Ring) -> None:
        self.ring, self.sink = ring, None
        self.pinned = PinnedRing(ring, take=self._take, release=self._release)

    def close(self) -> None:
        """Unpin the memory."""
        self.pinned.close()

    def _take(self) -> int | None:
        assert self.sink is not None
        return self.sink.take_soon()

    def _release(self, slots: Sequence[int]) -> None:
        assert self.sink is not None
        self.sink.release(slots)


class GpuGradientEncoder:
    """Encodes tensors of one GPU. For one thread. ``memory``: bytes of device memory of the encoder. ``small``: bytes of the
    largest tensors that are stored as they are."""

    def __init__(self, device: torch.device, ring: SharedRing, *, memory: int = _MEMORY, small: int = SMALL) -> None:
        self._device, self._ring, self._small = device, ring, small
        self._encoder = Encoder(self._device, DEFLATE, ring.pinned, size=memory, priority=-1)  # the next step waits for it
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=-5)  # the host waits for it
        self._factor = 1.0
        self._pieces: tuple[object, list[GradientPiece]] = (None, [])
        self._layout: tuple[object, Layout | None] = (None, None)

    def encode(
        self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event, sink: EntryWriter, on_read: Callable[[], None]
    ) -> list[RecordedTensor]:
        """Add tensors, which are there after the event ``ready``, to an entry; return their records. They may be overwritten.
        ``on_read`` is called when they are not needed any more."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            small, large = list[int](), list[int]()
            for place, one in enumerate(tensors):
                (large if one.numel() * one.itemsize > self._small else small).append(place)
            examined = [Examined(tensors[place]) for place in large]
            try:
                raw = self._to_host([tensors[place] for place in small])
                self._examine(examined)
            finally:
                self._stream.synchronize()  # also after an error: the tensors may be overwritten then
            found = dict[int, RecordedTensor]()

            def record_small() -> None:
                parts = raw.split([tensors[place].numel() * tensors[place].itemsize for place in small])
                for place, part in zip(small, parts, strict=True):
                    copied = part.clone().view(tensors[place].dtype).reshape(tensors[place].shape)
                    found[place] = uncoded(copied, sink.copy)

            request = EncodeRequest((), self._stream.record_event(), on_read, meanwhile=record_small)
            self._encode([one for one in examined if one.kind != "zero"], request, sink)
        found.update({place: one.record for place, one in zip(large, examined, strict=True)})
        return [found[place] for place in range(len(tensors))]

    def close(self) -> None:
        """Free all memory."""
        self._encoder.close()

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Enqueue a copy of the bytes of small tensors to host memory; return them."""
        parts = [one.reshape(-1).view(torch.uint8) for one in tensors]
        nbytes = sum(map(len, parts))
        padding = torch.zeros(-nbytes % 8, dtype=torch.uint8, device=self._device)
        return copy_kernels.to_host(torch.cat([*parts, padding]).view(torch.int64)).view(torch.uint8)[:nbytes]

    def _examine(self, examined: list[Examined]) -> None:
        """Find tensors that are zero, and float32 tensors that can be stored as bfloat16 values.

        The host waits for the device a few times only, since every wait may take milliseconds.
        """
        floats = [one for one in examined if one.tensor.dtype == torch.float32]
        others = [one for one in examined if one.tensor.dtype != torch.float32]
        if others:
            norms = torch.stack(torch._foreach_norm([one.tensor for one in others], ord=float("inf"))).cpu().tolist()
            for one, norm in zip(others, norms, strict=True):
                if norm == 0.0 and not bool(one.tensor.reshape(-1).view(torch.uint8).any()):
                    one.kind = "zero"
        unscaled = self._factor == 1.0  # in the step before, and most likely in this one
        left = self._replace(floats, 1.0) if unscaled else floats
        if left:
            self._factor = self._common_factor([one.tensor for one in left])
            left = self._replace(left, self._factor) if self._factor != 1.0 else left
            if not unscaled:
                self._replace(left, 1.0)

    def _common_factor(self, tensors: Sequence[torch.Tensor]) -> float:
        """The factor that fits a sample of one of the largest tensors; 1 if there is none."""
        largest = sorted(tensors, key=torch.numel, reverse=True)[:_SAMPLED]
        words = torch.stack([sampled(tensor.reshape(-1).view(torch.int32))[:_SAMPLE] for tensor in largest])
        copied = copy_kernels.to_host(words.view(torch.int64)).view(torch.int32)
        self._stream.synchronize()
        for sample in copied:
            for factor in dict.fromkeys((1.0, *factors(sample))):
                if bool(sample.any()) and divided(sample.view(torch.float32), factor) is not None:
                    return factor
        return 1.0

    def _replace(self, examined: Sequence[Examined], factor: float) -> list[Examined]:
        """Replace the values of tensors that are multiples of the factor; return those that are not. Note which are zero."""
        if not examined:
            return []
        found = bfloat16_kernels.check([one.tensor for one in examined], factor)
        self._stream.synchronize()
        some, misses = found.T.tolist()
        for one in itertools.compress(examined, (not nonzero for nonzero in some)):
            one.kind = "zero"
        multiples = [one for one, miss in zip(examined, misses, strict=True) if one.kind != "zero" and not miss]
        if multiples:
            for one, values in zip(multiples, bfloat16_kernels.narrow([one.tensor for one in multiples], factor), strict=True):
                one.kind, one.factor, one.values = ("bfloat16" if factor == 1.0 else "scaled"), factor, values
        return list(itertools.compress(examined, misses))

    def _encode(self, examined: Sequence[Examined], request: EncodeRequest, sink: EntryWriter) -> None:
        pieces, owners = self._cut(examined)
        if not pieces:
            request.meanwhile()
            request.on_read()
            return
        coded, ring, pinned = dict[int, CodedPart](), self._ring.ring, self._ring.pinned  # by number of the piece

        def emit(arrived: list[Arrived]) -> None:
            plan = self._encoder.plan
            assert plan is not None
            if plan is not self._layout[0]:
                self._layout = plan, Layout(plan.layout(self._device.index or 0, pieces))
            layout = self._layout[1]
            assert layout is not None
            chunks = [chunk for one in arrived for chunk in layout.chunks(one.message)]
            start = sink.add([part for chunk in chunks for part in chunk.parts])
            for chunk in chunks:
                number, digest = int(chunk.info.name), chunk.stored_digest or _digest(ring, chunk)
                coded[number] = coded_part(chunk.coding, pieces[number].nbytes, chunk.digest, digest, start)
                start += chunk.coding.size
            pinned.announced(run for one in arrived for run in one.runs)

        self._ring.sink = sink
        try:
            self._encoder.encode(dataclasses.replace(request, pieces=pieces), emit)
            pinned.end()
        except BaseException:
            pinned.abandon()
            raise
        for number, owner in enumerate(owners):
            owner.parts.append(coded[number])

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


def _digest(ring: Ring, chunk: CodedChunk) -> bytes:
    """The digest of a chunk's stored bytes, if the GPU has not computed it."""
    return stored_digest(np.concatenate([ring.slot(slot)[at : at + size] for slot, at, size in chunk.parts]))
