"""Kernels replace float32 multiples of bfloat16 values by these values, with the result of ``gradient_coding.divided``."""

from __future__ import annotations

import pytest
import torch
from helpers.bfloat16_multiples import FACTOR, cases
from helpers.replaced_parts import replace_parts

from raystow.orchestrator.journal.gradient_coding import divided
from raystow.workers.gpu import kernel_args
from raystow.workers.gpu.kernels import bfloat16_kernels
from streams.device import SEEDS, Device

pytestmark = pytest.mark.parametrize("gpu", SEEDS, indirect=True)


@pytest.mark.parametrize("rows", [kernel_args.MOST_ROWS, 2])
def test_multiples_of_bfloat16_values_are_replaced(gpu: Device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parts(monkeypatch, [(kernel_args, "MOST_ROWS", rows)])
    tensors, fit = zip(*cases(large=40_000), strict=True)
    found = bfloat16_kernels.check(tensors, FACTOR)
    gpu.synchronize()
    some, misses = found.T.tolist()
    assert [bool(one) for one in misses] == [not fits for fits in fit]
    assert [bool(one) for one in some] == [bool(one.view(torch.int32).any()) for one in tensors]
    multiples = [one for one, fits in zip(tensors, fit, strict=True) if fits]
    expected = [divided(one.clone().reshape(-1), FACTOR) for one in multiples]
    replaced = bfloat16_kernels.narrow(multiples, FACTOR)
    gpu.synchronize()
    for values, those, tensor in zip(replaced, expected, multiples, strict=True):
        assert those is not None
        assert torch.equal(values.view(torch.int16), those.view(torch.int16))
        assert values.data_ptr() == tensor.data_ptr()
