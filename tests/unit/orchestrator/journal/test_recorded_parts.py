"""Recorded tensors in host memory: a part is decoded only if its stored bytes match their digest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.journal_port import MemorySink
from msgspec.structs import replace

from raystow.orchestrator.journal import gradient_coding
from raystow.orchestrator.journal.entry_decoder import placed
from raystow.orchestrator.journal.gradient_coding import TensorEncoder, checked_dtype, decode, uncoded
from raystow.storage.errors import Damaged


def refuse(*_: object) -> None:
    raise AssertionError("bytes that were not checked are decoded")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_damaged_bytes_are_not_decoded(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MemorySink()
    recorded = TensorEncoder(part=8 << 10).encode(torch.linspace(-1, 1, 6_000), sink.copy)
    data = np.frombuffer(sink.content, np.uint8)
    assert len(recorded.parts) == 3
    assert decode(recorded, data) is not None
    data[recorded.parts[part].start] ^= 1
    decoded = gradient_coding.chunk.decode
    calls = iter([decoded] * part + [refuse])
    monkeypatch.setattr(gradient_coding.chunk, "decode", lambda *of: next(calls)(*of))
    with pytest.raises(Damaged, match="stored bytes of a recorded tensor"):
        decode(recorded, data)


@pytest.mark.parametrize("moved", [2, 8 << 10, 16 << 10])
def test_parts_of_no_or_negative_size_are_refused(moved: int) -> None:
    """A GPU writes each part to its place in the tensor, so that all of them must be within it."""
    sink = MemorySink()
    recorded = TensorEncoder(part=8 << 10).encode(torch.linspace(-1, 1, 6_000), sink.copy)
    first, second, *rest = recorded.parts
    parts = replace(first, nbytes=first.nbytes - moved), replace(second, nbytes=second.nbytes + moved), *rest
    with pytest.raises(Damaged, match="do not add up"):
        checked_dtype(replace(recorded, parts=parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_small_tensors_are_stored_as_they_are(dtype: torch.dtype) -> None:
    """All bits come back, also those of NaNs; several are placed together."""
    tensors = [torch.arange(one).to(torch.uint8).repeat(16).view(dtype)[:one].reshape(-1, 1) for one in (1, 5, 7)]
    if dtype == torch.float32:
        tensors[2].view(torch.int32)[:] = 0x7FC12345  # a NaN
    sink = MemorySink()
    recorded = [uncoded(tensor, sink.copy) for tensor in tensors]
    found = [decode(one, np.frombuffer(sink.content, np.uint8)) for one in recorded]
    for tensor, again in zip(tensors, found, strict=True):
        assert again is not None
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert again.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    on_device = placed([one for one in found if one is not None], [torch.device("meta")] * 3)
    assert [(one.device.type, one.dtype, one.shape) for one in on_device] == [("meta", one.dtype, one.shape) for one in tensors]
