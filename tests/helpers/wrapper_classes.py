"""Tensor subclasses as libraries define them: a wrapper consists of inner tensors and plain metadata."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


class Quantized(torch.Tensor):
    """Codes of one byte, with a scale for each block of ``block`` elements, and a table. Operations dequantize."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int) -> None:
        self.codes, self.scale, self.table, self.block = codes, scale, table, block

    @classmethod
    def random(cls, shape: tuple[int, ...], block: int = 4) -> Quantized:
        codes = torch.randint(-128, 128, shape, dtype=torch.int8)
        return cls(codes, torch.randn(-(-codes.numel() // block)), torch.randn(16), block)

    def blank(self) -> Quantized:
        return type(self)(torch.zeros_like(self.codes), torch.zeros_like(self.scale), torch.zeros_like(self.table), self.block)

    def same(self, other: Quantized) -> bool:
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in ("codes", "scale", "table"))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"block": self.block, "shape": self.shape}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"], inner["table"], context["block"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].table, args[0].block)
        plain = pytree.tree_map_only(Quantized, lambda one: one.codes.float(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class RowScaled(torch.Tensor):
    """Codes of one byte, with a scale for each row. Operations dequantize."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> RowScaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = pytree.tree_map_only(RowScaled, lambda one: one.codes * one.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Flat(torch.Tensor):
    """Codes of one byte without the shape of the tensor, as packed ones have it."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], self.shape

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Flat:
        return cls(inner["codes"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Opaque(torch.Tensor):
    """A subclass that does not say of what it consists."""


class Derived(RowScaled):
    """Its scale is a new tensor each time."""

    @property  # type: ignore[override]
    def scale(self) -> torch.Tensor:
        return torch.ones(len(self.codes), 1)

    @scale.setter
    def scale(self, scale: torch.Tensor) -> None:
        pass


class Secretive(RowScaled):
    """Its metadata is an object."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], object()
