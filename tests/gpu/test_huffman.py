"""The Deflate encoder of the GPU writes valid Deflate: zlib and the decoder of the GPU read it."""

from __future__ import annotations

import zlib

import pytest
import torch
from helpers.deflate_streams import decoded, encoded
from helpers.plane_streams import STREAM, cases, check_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]


def test_zlib_and_the_gpu_decode_encoded_streams() -> None:
    given = cases()
    coded, plain = encoded(given.values(), "cuda"), [stream.numpy().tobytes() for stream in given.values()]
    for what, data, stream in zip(given, coded, plain, strict=True):
        assert zlib.decompress(data, wbits=-15) == stream, what
    check_sizes(dict(zip(given, map(len, coded), strict=True)))
    assert decoded(coded, list(map(len, plain)), device="cuda") == ([0] * len(plain), plain)


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
