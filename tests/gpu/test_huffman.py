"""The Deflate encoder of the GPU writes valid Deflate: zlib and the decoder of the GPU read it."""

from __future__ import annotations

import zlib

import pytest
import torch
from plane_streams import STREAM, cases, check_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]


def test_zlib_and_the_gpu_decode_encoded_streams() -> None:
    from raystow.workers.gpu.kernels.deflate_kernels import Deflate

    coder, given = Deflate(), cases()
    n = len(given)
    sources = [stream.cuda() for stream in given.values()]
    sizes = torch.tensor([len(stream) for stream in sources], device="cuda")
    out = torch.full((n, coder.stride), 0xAB, dtype=torch.uint8, device="cuda")
    back = torch.zeros((n, STREAM), dtype=torch.uint8, device="cuda")
    at = torch.tensor([stream.data_ptr() for stream in sources], device="cuda")
    targets, returned = (rows.data_ptr() + torch.arange(n, device="cuda") * rows.shape[1] for rows in (out, back))
    coded, decoded = (torch.zeros(n, dtype=torch.int64, device="cuda") for _ in range(2))
    scratch = torch.empty(max(coder.coding_scratch(n), coder.decoding_scratch(n)), dtype=torch.uint8, device="cuda")
    status = torch.ones(n, dtype=torch.int32, device="cuda")
    coder.compress(at, sizes, targets, coded, scratch=scratch, status=status)
    assert not status.any()
    for (what, stream), row, size in zip(given.items(), out.cpu(), coded.tolist(), strict=True):
        assert zlib.decompress(row[:size].numpy().tobytes(), wbits=-15) == stream.numpy().tobytes(), what
    check_sizes(dict(zip(given, coded.tolist(), strict=True)))
    status.fill_(1)
    coder.decompress(targets, coded, returned, sizes, decoded=decoded, scratch=scratch, status=status)
    assert not status.any()
    assert torch.equal(decoded, sizes)
    for (what, stream), row in zip(given.items(), back.cpu(), strict=True):
        assert torch.equal(row[: len(stream)], stream), what


def test_a_stream_that_expands_stays_in_its_buffer() -> None:
    from raystow.workers.gpu.kernels import constants, deflate_kernels

    coder = deflate_kernels.Deflate()
    at = torch.arange(STREAM, device="cuda")
    sampled = at % 4 == at // (4 * constants.WORDS) % 4
    steep = torch.rand(STREAM, device="cuda").log2().neg().floor().clamp(max=14)  # value k has probability 2**-(k + 1)
    misleading = torch.where(sampled, steep, 14).to(torch.uint8)  # the rarest value where the encoder does not sample
    out = torch.full((2 * coder.stride,), 0xAB, dtype=torch.uint8, device="cuda")
    places = [torch.tensor([number], device="cuda") for number in (misleading.data_ptr(), STREAM, out.data_ptr(), 0)]
    scratch = torch.empty(coder.coding_scratch(1), dtype=torch.uint8, device="cuda")
    coder.compress(*places, scratch=scratch, status=torch.ones(1, dtype=torch.int32, device="cuda"))
    assert places[3].item() > STREAM
    assert (out[coder.stride :] == 0xAB).all()
