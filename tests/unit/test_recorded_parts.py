"""Recorded tensors in host memory: a part is decoded only if its stored bytes match their digest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raystow.orchestrator.journal import gradient_coding
from raystow.orchestrator.journal.gradient_coding import TensorEncoder, decode
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import Damaged


def refuse(*_: object) -> None:
    raise AssertionError("bytes that were not checked are decoded")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_damaged_bytes_are_not_decoded(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_coding, "PART", 8 << 10)
    recorded = TensorEncoder().encode(torch.linspace(-1, 1, 6_000))
    stored: list[Bytes] = [np.array(one) for one in recorded.stored]
    assert len(stored) == 3
    assert decode(recorded.tensor, iter(stored)) is not None
    stored[part][-1] ^= 1
    decoded = gradient_coding.chunk.decode
    calls = iter([decoded] * part + [refuse])
    monkeypatch.setattr(gradient_coding.chunk, "decode", lambda *of: next(calls)(*of))
    with pytest.raises(Damaged, match="stored bytes of a recorded tensor"):
        decode(recorded.tensor, iter(stored))
