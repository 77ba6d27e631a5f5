"""float32 tensors that are bfloat16 values times one number, and tensors that differ from that in one element."""

from __future__ import annotations

import numpy as np
import torch

FACTOR = 0.7310586 * 2


def products(size: int, factor: float = FACTOR) -> torch.Tensor:
    """Return products of ``factor`` with random bfloat16 values of all magnitudes, infinities and both zeros."""
    torch.manual_seed(size)
    words = torch.randint(-(1 << 15), 1 << 15, (size,), dtype=torch.int32).to(torch.int16)
    values = words.view(torch.bfloat16)
    values[values.isnan()] = -0.0
    return values.to(torch.float32) * np.float32(factor)


def with_one(tensor: torch.Tensor, place: int, bits: int) -> torch.Tensor:
    """Return a copy in which one element has these bits."""
    changed = tensor.clone()
    changed.view(torch.int32)[place] = bits
    return changed


def cases(large: int) -> list[tuple[torch.Tensor, bool]]:
    """Return tensors, and whether all their values are such products. ``large``: elements of the largest."""
    quiet_nan, next_of_one = 0x7FC00000, 0x3F800001
    return [
        (products(large), True),
        (products(4096), True),
        (products(4097), True),
        (products(1), True),
        (products(8193).reshape(-1, 3), True),
        (torch.zeros(5000), True),
        (with_one(products(9000), 8999, quiet_nan), False),
        (with_one(products(large), large - 1, next_of_one), False),
        (with_one(products(70), 0, next_of_one), False),
    ]
