"""Encodes recorded tensors without loss, on the CPU, and decodes them.

Gradients of mixed-precision trainings are float32 tensors whose values are bfloat16 values, or these times one number (the
coefficient of gradient clipping, or the inverse of a loss scale). Both are recognized exactly: the product is computed again and
compared bit for bit. They take the bytes of bfloat16 values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ...storage.coding import chunk, dtypes
from ...storage.coding.digest import raw_digest, stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged
from ...workers.protocol.messages import CodedPart, RecordedTensor

PART = 4 << 20
"""Raw bytes of a part of a tensor."""

SMALL = 32 << 10
"""Bytes of the largest tensors on a GPU that are stored as they are: coding one takes a third of a millisecond, and models have
hundreds."""

NONE = RecordedTensor("none")

WITHOUT_BYTES = ("none", "zero")
"""Kinds of tensors of which nothing is stored."""

_SAMPLE = 4096  # elements from which a factor is found
_MOST = 128  # bfloat16 values have so many mantissas: a tensor of their multiples has no more
_MANTISSA = (1 << 23) - 1
_ONE = 127 << 23  # the exponent of values from 1 to 2


Add = Callable[[Bytes], int]
"""Adds bytes to an entry, and returns where they begin."""


class TensorEncoder:
    """Encodes tensors in host memory. For one thread. Factors that were found are tried first for the next tensors.
    ``part``: bytes of a part of a tensor, before coding."""

    def __init__(self, *, part: int = PART) -> None:
        self._chunks, self._part = chunk.ChunkEncoder(part), part
        self._factors: list[float] = []

    def encode(self, tensor: torch.Tensor | None, add: Add) -> RecordedTensor:
        """Add the bytes of a tensor that nobody changes meanwhile; return its record."""
        if tensor is None:
            return NONE
        tensor = tensor.contiguous()
        name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        if not raw.any():
            return RecordedTensor("zero", name, shape)
        if tensor.dtype == torch.float32:
            found = self._as_bfloat16(tensor.reshape(-1))
            if found is not None:
                factor, values = found
                kind = "scaled" if factor != 1.0 else "bfloat16"
                parts = self._parts(values.view(torch.uint8).numpy(), "bfloat16", add)
                return RecordedTensor(kind, name, shape, factor, parts)  # type: ignore[arg-type]
        return RecordedTensor("plain", name, shape, 1.0, self._parts(raw, name, add))

    def _parts(self, raw: Bytes, name: str, add: Add) -> tuple[CodedPart, ...]:
        parts, dtype = list[CodedPart](), dtypes.dtype(name)
        for start in range(0, raw.size, self._part):
            piece = raw[start : start + self._part]
            out, coding = self._chunks.encode(piece, dtype)
            parts.append(coded_part(coding, piece.size, raw_digest(piece), stored_digest(out), add(out)))
        return tuple(parts)

    def _as_bfloat16(self, values: torch.Tensor) -> tuple[float, torch.Tensor] | None:
        """A factor and the bfloat16 values that give float32 ``values`` by multiplication, bit for bit; None if none do."""
        words = values.view(torch.int32)
        sample = sampled(words)
        if not int((sample & 0xFFFF).count_nonzero()) and not int((words & 0xFFFF).count_nonzero()):
            return 1.0, (words >> 16).to(torch.int16).view(torch.bfloat16)
        for factor in (*self._factors, *factors(sample)):
            if factor == 1.0 or divided(sample.view(torch.float32), factor) is None:
                continue
            quotients = divided(values, factor)
            if quotients is not None:
                self._factors = [factor, *(known for known in self._factors if known != factor)][:4]
                return factor, quotients
        return None


def uncoded(tensor: torch.Tensor, add: Add) -> RecordedTensor:
    """Add the bytes of a small, contiguous tensor in host memory as they are; return its record."""
    raw, name, shape = tensor.reshape(-1).view(torch.uint8).numpy(), dtype_name(tensor.dtype), tuple(tensor.shape)
    if not raw.any():
        return RecordedTensor("zero", name, shape)
    coding = chunk.Coding(False, False, (chunk.RAW,), (raw.size,), b"", 1)
    part = coded_part(coding, raw.size, raw_digest(raw), stored_digest(raw), add(raw))
    return RecordedTensor("plain", name, shape, 1.0, (part,))


def sampled(words: torch.Tensor) -> torch.Tensor:
    """Up to 4,096 elements, evenly spread."""
    return words[:: max(1, words.numel() // _SAMPLE)][:_SAMPLE].contiguous()


def factors(sample: torch.Tensor) -> list[float]:
    """Numbers in [1, 2) of which the float32 values with these bits (int32) may be multiples by bfloat16 values.

    A hundredth of random bfloat16 values are powers of two, so that their products have the factor's mantissa.
    """
    words = sample.numpy()
    words = words[(words & 0x7FFFFFFF) != 0]
    mantissas = np.unique(words & _MANTISSA)
    if not 0 < mantissas.size <= _MOST:
        return []
    return [float(value) for value in (mantissas | _ONE).astype(np.int32).view(np.float32)]


def divided(values: torch.Tensor, factor: float) -> torch.Tensor | None:
    """The bfloat16 values that give float32 ``values`` when multiplied by ``factor``; None if there are none."""
    quotients = (values / factor).to(torch.bfloat16)
    same = bool((multiplied(quotients, factor).view(torch.int32) == values.view(torch.int32)).all())
    return quotients if same else None


def multiplied(values: torch.Tensor, factor: float) -> torch.Tensor:
    """The float32 products of bfloat16 values with a number that float32 can hold."""
    return values.to(torch.float32) * factor


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type; raises ``Unsupported`` if the format has none."""
    return dtypes.dtype(str(dtype).removeprefix("torch.")).name


def coded_part(of: chunk.Coding, nbytes: int, digest: int, stored: bytes, start: int) -> CodedPart:
    """The description of a part. ``stored``: the digest of its stored bytes."""
    return CodedPart(nbytes, digest, stored, of.planes, of.rotated, of.codecs, of.stored, of.streams, of.stream, start)


def decode(tensor: RecordedTensor, data: Bytes) -> torch.Tensor | None:
    """Return the recorded tensor in host memory. ``data``: the bytes of the entry.

    Raises ``Damaged`` if the bytes do not have their digests, or do not fit the description.
    """
    if tensor.kind in WITHOUT_BYTES:
        return without_bytes(tensor, torch.device("cpu"))
    name = checked_dtype(tensor)
    raw = np.empty(sum(part.nbytes for part in tensor.parts), np.uint8)
    at = 0
    for part in tensor.parts:
        piece = raw[at : at + part.nbytes]
        decode_part(part, name, data[part.start : part.start + sum(part.stored)], piece)
        at += part.nbytes
    return from_values(tensor, torch.from_numpy(raw).view(getattr(torch, name)))


def without_bytes(tensor: RecordedTensor, device: torch.device) -> torch.Tensor | None:
    """The recorded tensor, one of ``WITHOUT_BYTES``."""
    if tensor.kind == "none":
        return None
    return torch.zeros(tensor.shape, dtype=getattr(torch, dtypes.dtype(tensor.dtype).name), device=device)


def from_values(tensor: RecordedTensor, values: torch.Tensor) -> torch.Tensor:
    """The recorded tensor from its stored values, on their device."""
    if tensor.kind == "scaled":
        values = multiplied(values, tensor.factor)
    return values.to(getattr(torch, tensor.dtype)).reshape(tensor.shape)


def checked_dtype(tensor: RecordedTensor) -> str:
    """The element type of the stored values of a tensor. Raises ``Damaged`` unless they are as many as it has elements."""
    direct = tensor.kind == "plain"
    if not direct and tensor.dtype != "float32":
        raise Damaged(f"values of {tensor.dtype} recorded as bfloat16")
    name = tensor.dtype if direct else "bfloat16"
    itemsize = dtypes.dtype(name).itemsize
    if sum(part.nbytes for part in tensor.parts) != math.prod(tensor.shape) * itemsize or any(
        part.nbytes < 1 or part.nbytes % itemsize for part in tensor.parts
    ):
        raise Damaged("the parts of a recorded tensor do not add up to it")
    return name


def decode_part(part: CodedPart, name: str, stored: Bytes, raw: Bytes) -> None:
    """Decode a part into ``raw``; ``Damaged`` if the stored bytes or the result do not have their digest."""
    if stored_digest(stored) != part.stored_digest:
        raise Damaged("the stored bytes of a recorded tensor do not have their digest")
    coding = chunk.Coding(part.planes, part.rotated, part.codecs, part.stored, part.streams, part.stream)
    chunk.decode(coding, dtypes.dtype(name), stored, raw)
    if raw_digest(raw) != part.digest:
        raise Damaged("a recorded tensor does not have its digest")
