"""Kernels on a GPU replace float32 multiples of bfloat16 values by these values in place, in many concurrent programs."""

from __future__ import annotations

import pytest
import torch
from helpers.bfloat16_multiples import FACTOR, cases

from raystow.orchestrator.journal.gradient_coding import divided
from raystow.workers.gpu.kernels import bfloat16_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_multiples_of_bfloat16_values_are_replaced() -> None:
    hosts, fit = zip(*cases(large=30_000_000), strict=True)
    tensors = [one.cuda() for one in hosts]
    found = bfloat16_kernels.check(tensors, FACTOR)
    torch.cuda.synchronize()
    some, misses = found.T.tolist()
    assert [bool(one) for one in misses] == [not fits for fits in fit]
    assert [bool(one) for one in some] == [bool(one.view(torch.int32).any()) for one in hosts]
    multiples = [one for one, fits in zip(tensors, fit, strict=True) if fits]
    expected = [divided(one.reshape(-1), FACTOR) for one, fits in zip(hosts, fit, strict=True) if fits]
    for values, those in zip(bfloat16_kernels.narrow(multiples, FACTOR), expected, strict=True):
        assert those is not None
        assert torch.equal(values.cpu().view(torch.int16), those.view(torch.int16))


def test_values_of_a_large_tensor_are_replaced() -> None:
    """More values than a grid of one launch can cover."""
    size = (1 << 29) + 4097
    values = torch.randint(-(1 << 7), 1 << 7, (size,), dtype=torch.int8, device="cuda").to(torch.bfloat16)
    (replaced,) = bfloat16_kernels.narrow([values.float()], 1.0)
    assert torch.equal(replaced, values)
