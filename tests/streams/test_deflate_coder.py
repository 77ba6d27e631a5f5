"""The Deflate encoder, run in Triton's interpreter, writes streams that zlib decodes."""

from __future__ import annotations

import zlib

import pytest
import torch
from device import interpret
from plane_streams import cases, check_sizes

from raystow.workers.gpu.kernels.deflate_kernels import Deflate
from raystow.workers.gpu.kernels.library import Kernel

TRIED = (
    *("exponents", "exponents, fewer", "zeros", "hardly anything but zeros", "zeros in rows", "one of each among zeros"),
    *("runs of 5 zeros", "runs of 257 zeros", "five zeros"),
)


def test_zlib_decodes_encoded_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "launch", interpret)
    coder, given = Deflate(), {name: stream for name, stream in cases().items() if name in TRIED}
    n = len(given)
    assert n == len(TRIED)
    sizes = torch.tensor([len(stream) for stream in given.values()])
    out = torch.full((n, coder.stride), 0xAB, dtype=torch.uint8)
    sources = torch.tensor([stream.data_ptr() for stream in given.values()])
    targets, coded = out.data_ptr() + torch.arange(n) * coder.stride, torch.zeros(n, dtype=torch.int64)
    scratch = torch.empty(coder.coding_scratch(n), dtype=torch.uint8)
    coder.compress(sources, sizes, targets, coded, scratch=scratch, status=torch.ones(n, dtype=torch.int32))
    for (what, stream), row, size in zip(given.items(), out, coded.tolist(), strict=True):
        assert zlib.decompress(row[:size].numpy().tobytes(), wbits=-15) == stream.numpy().tobytes(), what
    check_sizes(dict(zip(given, coded.tolist(), strict=True)))
