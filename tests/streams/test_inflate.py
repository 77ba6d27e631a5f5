"""The Deflate decoder, run in Triton's interpreter, decodes the streams of the encoder and rejects all others.

Streams are short because the interpreter is slow; tests/gpu/test_deflate_decoder.py tests all kinds of streams.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from helpers.deflate_streams import decoded, encoded
from helpers.plane_streams import cases

pytestmark = pytest.mark.usefixtures("interpreted")


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
    (data,) = encoded([stream])
    if len(data) >= len(stream) + 400:
        pytest.skip("such a stream is stored raw")
    assert decoded([data], [len(stream)], shift=len(name) % 8) == ([0], [stream.numpy().tobytes()])


def test_foreign_streams_are_rejected() -> None:
    stream = TRIED["exponents"].numpy().tobytes()
    for level in (0, 1, 9):
        made = zlib.compressobj(level, zlib.DEFLATED, -15)
        assert decoded([made.compress(stream) + made.flush()], [len(stream)]) == ([1], [b""])
    (data,) = encoded([TRIED["exponents"]])
    assert decoded([data], [len(stream) - 1])[0] == [1], "the stream has more bytes than expected"
    assert decoded([data[:-40]], [len(stream)])[0] == [1], "the stream is truncated"
    assert decoded([b""], [100])[0] == [1]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_stay_in_their_buffers(seed: int) -> None:
    draw = np.random.default_rng(seed)
    data = bytearray(*encoded([uniform(40, 600)]))
    for _ in range(3):
        data[draw.integers(4 if seed % 2 else 40, len(data))] ^= 1 << draw.integers(8)
    (status,), (found,) = decoded([bytes(data)], [600])
    assert status == 1 or len(found) == 600
