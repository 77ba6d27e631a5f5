"""The Deflate decoder of the GPU decodes the streams of its own encoder and rejects all others."""

from __future__ import annotations

import zlib

import pytest
import torch
from plane_streams import STREAM, cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

FILLED = 0xAB


def decode(streams: list[bytes], sizes: list[int], *, shift: int = 0) -> tuple[list[int], list[bytes]]:
    """Return the status and the bytes of each stream; check that the decoder writes nothing outside each output buffer."""
    from raystow.workers.gpu.kernels.deflate_kernels import Deflate

    coder, n, room = Deflate(), len(streams), STREAM + 64
    padded = [bytes(shift) + stream + bytes(-len(stream) % 8 + 16) for stream in streams]
    memory = torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8).cuda()
    starts = torch.tensor([0, *[len(one) for one in padded[:-1]]]).cumsum(0) + shift
    out = torch.full((n, room), FILLED, dtype=torch.uint8, device="cuda")
    table = torch.stack(
        [
            memory.data_ptr() + starts,
            torch.tensor([len(one) for one in streams]),
            out.data_ptr() + torch.arange(n) * room,
            torch.tensor(sizes),
        ]
    ).cuda()
    decoded, status = torch.zeros(n, dtype=torch.int64, device="cuda"), torch.full((n,), 7, dtype=torch.int32, device="cuda")
    scratch = torch.full((coder.decoding_scratch(n),), FILLED, dtype=torch.uint8, device="cuda")
    coder.decompress(*table, decoded=decoded, scratch=scratch, status=status)
    rows = out.cpu()
    for row, size in zip(rows, sizes, strict=True):
        assert (row[size:] == FILLED).all()
    found = [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
    return status.tolist(), found


def encode(streams: list[torch.Tensor]) -> list[bytes]:
    from raystow.workers.gpu.kernels.deflate_kernels import Deflate

    coder, n = Deflate(), len(streams)
    sources = [stream.cuda() for stream in streams]
    out = torch.zeros((n, coder.stride), dtype=torch.uint8, device="cuda")
    numbers = [
        torch.tensor([stream.data_ptr() for stream in sources], device="cuda"),
        torch.tensor([len(stream) for stream in streams], device="cuda"),
        out.data_ptr() + torch.arange(n, device="cuda") * coder.stride,
        torch.zeros(n, dtype=torch.int64, device="cuda"),
    ]
    scratch = torch.empty(coder.coding_scratch(n), dtype=torch.uint8, device="cuda")
    coder.compress(*numbers, scratch=scratch, status=torch.ones(n, dtype=torch.int32, device="cuda"))
    return [row[:size].numpy().tobytes() for row, size in zip(out.cpu(), numbers[3].tolist(), strict=True)]


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_encoded_streams_are_decoded(shift: int) -> None:
    torch.manual_seed(shift)
    given = [*cases().values(), *(torch.randint(0, k, (STREAM - 7 * k,), dtype=torch.uint8) for k in range(2, 60))]
    coded = encode(given)
    kept = [(data, stream) for data, stream in zip(coded, given, strict=True) if len(data) < STREAM]
    status, found = decode([data for data, _ in kept], [len(stream) for _, stream in kept], shift=shift)
    assert not any(status)
    assert found == [stream.numpy().tobytes() for _, stream in kept]


def test_foreign_and_damaged_streams_stay_in_their_buffers() -> None:
    torch.manual_seed(0)
    plain = cases()["exponents"].numpy().tobytes()
    others = []
    for level in (0, 1, 9):
        made = zlib.compressobj(level, zlib.DEFLATED, -15)
        others.append(made.compress(plain) + made.flush())
    assert decode(others, [len(plain)] * 3)[0] == [1, 1, 1]
    (coded,) = encode([cases()["exponents"]])
    damaged = []
    for at in torch.randint(0, 8 * len(coded), (2000,)).tolist():
        flipped = bytearray(coded)
        flipped[at // 8] ^= 1 << at % 8
        damaged.append(bytes(flipped))
    decode(damaged, [len(plain)] * len(damaged))
    decode([coded[:-k] for k in range(1, 200)], [len(plain)] * 199)
