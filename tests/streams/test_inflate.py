"""The Deflate decoder, run in Triton's interpreter, decodes the streams of the encoder and rejects all others.

Streams are short because the interpreter is slow; tests/gpu/test_deflate_decoder.py tests all kinds of streams.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from device import interpret
from plane_streams import STREAM, cases

from raystow.workers.gpu.kernels.deflate_kernels import Deflate
from raystow.workers.gpu.kernels.library import Kernel

FILLED = 0xAB


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "launch", interpret)


def coded(stream: torch.Tensor) -> bytes:
    coder, out = Deflate(), torch.zeros(Deflate.stride, dtype=torch.uint8)
    numbers = [torch.tensor([number]) for number in (stream.data_ptr(), len(stream), out.data_ptr(), 0)]
    scratch = torch.empty(coder.coding_scratch(1), dtype=torch.uint8)
    coder.compress(*numbers, scratch=scratch, status=torch.ones(1, dtype=torch.int32))
    return out[: numbers[3].item()].numpy().tobytes()


def decoded(data: bytes, room: int, *, shift: int = 0) -> tuple[int, bytes]:
    """Return the status and the decoded bytes; ``shift`` is added to the address of the stream."""
    padded = np.frombuffer(bytes(8 + shift) + data + bytes(8), np.uint8).copy()
    out = torch.full((STREAM + 64,), FILLED, dtype=torch.uint8)
    numbers = [torch.tensor([number]) for number in (padded.ctypes.data + 8 + shift, len(data), out.data_ptr() + 32, room)]
    made, status = torch.zeros(1, dtype=torch.int64), torch.full((1,), 7, dtype=torch.int32)
    coder = Deflate()
    scratch = torch.full((coder.decoding_scratch(1),), FILLED, dtype=torch.uint8)
    coder.decompress(*numbers, decoded=made, scratch=scratch, status=status)
    assert (out[:32] == FILLED).all()
    assert (out[32 + room :] == FILLED).all()
    return status.item(), out[32 : 32 + int(made.item())].numpy().tobytes()


def uniform(symbols: int, length: int) -> torch.Tensor:
    """Return bytes of uniform frequency, whose codes have one length and do not synchronize."""
    return torch.randint(0, symbols, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(symbols))


TRIED = {
    "exponents": cases()["exponents, fewer"],
    **{name: cases()[name] for name in ("zeros", "runs of 257 zeros", "each byte once", "the same byte")},
    "eight symbols": uniform(8, 700),
    "three symbols": uniform(3, 900),
    "one byte": uniform(200, 1),
    "few bytes": uniform(50, 37),
}


@pytest.mark.parametrize("name", TRIED)
def test_encoded_streams_are_decoded(name: str) -> None:
    stream = TRIED[name]
    data = coded(stream)
    if len(data) >= len(stream) + 400:
        pytest.skip("such a stream is stored raw")
    assert decoded(data, len(stream), shift=len(name) % 8) == (0, stream.numpy().tobytes())


def test_foreign_streams_are_rejected() -> None:
    stream = TRIED["exponents"].numpy().tobytes()
    for level in (0, 1, 9):
        made = zlib.compressobj(level, zlib.DEFLATED, -15)
        assert decoded(made.compress(stream) + made.flush(), len(stream)) == (1, b"")
    data = coded(TRIED["exponents"])
    assert decoded(data, len(stream) - 1)[0] == 1, "the stream has more bytes than expected"
    assert decoded(data[:-40], len(stream))[0] == 1, "the stream is truncated"
    assert decoded(b"", 100)[0] == 1


@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_stay_in_their_buffers(seed: int) -> None:
    draw = np.random.default_rng(seed)
    data = bytearray(coded(uniform(40, 600)))
    for _ in range(3):
        data[draw.integers(4 if seed % 2 else 40, len(data))] ^= 1 << draw.integers(8)
    status, found = decoded(bytes(data), 600)
    assert status == 1 or len(found) == 600
