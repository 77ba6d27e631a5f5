"""Decodes recorded tensors into device memory, by the decoder that restores use."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ...state.shards import words
from ...storage.coding import dtypes
from ...storage.coding.chunk import Coding
from ...storage.coding.kernels import Bytes
from ...storage.format.manifest import Chunk
from ...storage.object_store import Buffer
from ...storage.versions.runs import ByteRun, Piece, coalesced
from ...workers.journal.entry_bytes import POOL
from ...workers.protocol.messages import CodedPart, RecordedTensor
from .gradient_coding import SMALL, WITHOUT_BYTES, checked_dtype, decode, from_values, without_bytes

_ALIGN = 16  # bytes: kernels read words of this size

if TYPE_CHECKING:
    from ...workers.gpu.decode.decoder import Decoder


class EntryDecoder:
    """Decodes the tensors of entries, each to the device where it is needed; large ones for CPUs by several threads. For one
    thread. It keeps the memory of its ``Decoder`` for each GPU until ``close``."""

    def __init__(self) -> None:
        self._decoders: dict[torch.device, Decoder] = {}

    def decode(
        self, tensors: Sequence[RecordedTensor], data: Bytes, devices: Sequence[torch.device]
    ) -> list[torch.Tensor | None]:
        """Return tensors of one entry, each on its device. ``data``: the entry's bytes. Raises ``Damaged`` if the bytes of a
        tensor do not have their digests, or do not fit its description."""
        found: dict[int, torch.Tensor | None] = {}
        by_gpu, large, small = defaultdict[torch.device, list[int]](list), list[int](), list[int]()
        for place, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
            if tensor.kind in WITHOUT_BYTES:
                found[place] = without_bytes(tensor, device)
            elif sum(part.nbytes for part in tensor.parts) <= SMALL:
                small.append(place)
            else:
                (by_gpu[device] if device.type == "cuda" else large).append(place)
        for device, places in by_gpu.items():
            found.update(zip(places, self.on_gpu(device, [tensors[place] for place in places], data), strict=True))
        found.update(zip(large, POOL.map(decode, [tensors[place] for place in large], itertools.repeat(data)), strict=True))
        decoded = [cast(torch.Tensor, decode(tensors[place], data)) for place in small]  # threads would wait for each other
        found.update(zip(small, placed(decoded, [devices[place] for place in small]), strict=True))
        return [found[place] for place in range(len(tensors))]

    def close(self) -> None:
        """Free all memory."""
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()

    def on_gpu(self, device: torch.device, tensors: Sequence[RecordedTensor], data: Bytes) -> Iterator[torch.Tensor]:
        """Yield tensors of one entry, decoded on a GPU. None of them may be empty."""
        from ...workers.gpu.decode.decoder import Decoder

        if device not in self._decoders:
            self._decoders[device] = Decoder(device)

        def read(run: ByteRun, into: memoryview | None) -> Buffer:
            found = data[run.start : run.start + run.length]
            if into is None:
                return found.data
            np.copyto(np.frombuffer(into, np.uint8), found)  # without the interpreter lock
            return into

        targets, pieces = list[torch.Tensor](), list[Piece]()
        for number, tensor in enumerate(tensors):
            name = checked_dtype(tensor)
            size = sum(part.nbytes for part in tensor.parts) // dtypes.dtype(name).itemsize
            target = torch.empty(size, dtype=getattr(torch, name), device=device)
            pieces += _pieces(f"tensor {number}", name, tensor.parts, target)
            targets.append(target)
        self._decoders[device].fill(list(coalesced("journal entry", pieces)), read, lambda nbytes: None)
        for tensor, target in zip(tensors, targets, strict=True):
            yield from_values(tensor, target)


def placed(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Small tensors on their devices, by one copy for each device."""
    found, by_device = list(tensors), defaultdict[torch.device, list[int]](list)
    for place, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device != device:
            by_device[device].append(place)
    for device, places in by_device.items():
        raw = [tensors[place].reshape(-1).view(torch.uint8) for place in places]
        padded = [-(-one.numel() // _ALIGN) * _ALIGN for one in raw]
        packed = torch.empty(sum(padded), dtype=torch.uint8)
        for one, part in zip(raw, packed.split(padded), strict=True):
            part[: one.numel()] = one
        for place, one, part in zip(places, raw, packed.to(device).split(padded), strict=True):
            found[place] = part[: one.numel()].view(tensors[place].dtype).reshape(tensors[place].shape)
    return found


def _pieces(label: str, dtype: str, parts: Sequence[CodedPart], target: torch.Tensor) -> Iterator[Piece]:
    """The parts of a tensor, each with its place in ``target``: together all of it, in order. ``label``: for errors."""
    at, size, memory = 0, target.numel(), words(target)
    for part in parts:
        coding = Coding(part.planes, part.rotated, part.codecs, part.stored, part.streams, part.stream)
        extent = part.nbytes // dtypes.dtype(dtype).itemsize
        box, digests = ((size,), (at,), (extent,)), (part.digest, part.stored_digest)
        chunk = Chunk(label, label, "tensor", dtype, *box, 0, "", 0, part.start, coding, *digests)
        yield Piece(chunk, target=memory[at : at + extent], direct=True)
        at += extent
