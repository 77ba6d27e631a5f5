"""The Deflate decoder of the GPU decodes the streams of its own encoder and rejects all others."""

from __future__ import annotations

import zlib

import pytest
import torch
from helpers.deflate_streams import decoded, encoded
from helpers.plane_streams import STREAM, cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_encoded_streams_are_decoded(shift: int) -> None:
    torch.manual_seed(shift)
    given = [*cases().values(), *(torch.randint(0, k, (STREAM - 7 * k,), dtype=torch.uint8) for k in range(2, 60))]
    kept = [(data, stream) for data, stream in zip(encoded(given, "cuda"), given, strict=True) if len(data) < STREAM]
    status, found = decoded([data for data, _ in kept], [len(stream) for _, stream in kept], shift=shift, device="cuda")
    assert not any(status)
    assert found == [stream.numpy().tobytes() for _, stream in kept]


def test_foreign_and_damaged_streams_stay_in_their_buffers() -> None:
    torch.manual_seed(0)
    plain = cases()["exponents"].numpy().tobytes()
    others = []
    for level in (0, 1, 9):
        made = zlib.compressobj(level, zlib.DEFLATED, -15)
        others.append(made.compress(plain) + made.flush())
    assert decoded(others, [len(plain)] * 3, device="cuda")[0] == [1, 1, 1]
    (coded,) = encoded([cases()["exponents"]], "cuda")
    damaged = []
    for at in torch.randint(0, 8 * len(coded), (2000,)).tolist():
        flipped = bytearray(coded)
        flipped[at // 8] ^= 1 << at % 8
        damaged.append(bytes(flipped))
    decoded(damaged, [len(plain)] * len(damaged), device="cuda")
    decoded([coded[:-k] for k in range(1, 200)], [len(plain)] * 199, device="cuda")
