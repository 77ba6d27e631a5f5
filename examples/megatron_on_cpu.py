"""Megatron-Core without a GPU: places that name CUDA use the CPU, so that a GPT trains over gloo."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Makes tensors for ``device="cuda"`` on the CPU."""

    def __torch_function__(self, what: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return what(*args, **kwargs)


class NoStream:
    """A stream on which everything is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def replace_cuda() -> None:
    """Let Megatron's calls of ``torch.cuda`` reach the CPU, if there is no GPU."""
    if torch.cuda.is_available():
        return
    cuda, of_tensor = torch.cuda, torch.Tensor.type

    def type_as_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = of_tensor(self, *args, **kwargs)  # DistributedOptimizer compares the names of CUDA's types
        return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found

    def rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    torch.Tensor.type = type_as_on_gpu
    cuda.current_device = lambda: CPU
    cuda.get_rng_state, cuda.set_rng_state = rng_state, set_rng_state
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for name in ("synchronize", "empty_cache", "set_device"):  # of each its own function: torch.compile has a rule for each
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = (lambda *args: None), (lambda *args: None)
    cuda.Stream = cuda.Event = NoStream
    cuda.current_stream = lambda *args: NoStream()
    cuda.default_stream = lambda *args: NoStream()
    cuda.stream = lambda *args: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    nn.Module.cuda = lambda self, *args, **kwargs: self
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    OnCpu().__enter__()
