"""Tensors on a GPU, and their comparison bit for bit."""

from __future__ import annotations

import math

import torch


def weights(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return numbers that are distributed like weights."""
    return (torch.randn(n, device="cuda") * 0.02).to(dtype)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return numbers of any bits, NaNs included."""
    high, nbytes = 2 if dtype is torch.bool else 256, math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (nbytes,), dtype=torch.uint8, device="cuda").view(dtype).reshape(shape)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of all kinds of strides and sizes."""
    base = random_bits(dtype, 700, 1030)
    return {
        "plain": base,
        "transposed": base.t(),
        "strided": base[::3, 5:400:2],
        "one": random_bits(dtype, 1),
        "empty": random_bits(dtype, 0, 3),
        "scalar": random_bits(dtype),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors, on any devices, are equal in every bit."""
    bits_a, bits_b = (tensor.to(a.device).contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_a, bits_b)
