"""The state of a torch training for the trainers of other libraries: weights, optimizers and random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def state_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return weights and optimizer state by the names of the unwrapped ``model``, to save or to restore into.

    An optimizer without state is initialized first. Buffers are copied: unlike parameters, they change before the optimizer step.
    """
    weights, moments = get_state_dict(model, list(optimizers))
    buffers = {name for name, _ in model.named_buffers()}
    weights = {name: value.clone() if name in buffers else value for name, value in weights.items()}
    return {"model": weights, "optim": moments, "rng": torch.get_rng_state().numpy().tobytes(), "rng_cuda": _cuda()}


def load(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Load a restored result of ``state_of``, except the random generators."""
    weights, moments = state["model"], state["optim"]
    set_state_dict(model, list(optimizers), model_state_dict=weights, optim_state_dict=moments)


def load_rng(state: dict[str, Any]) -> None:
    """Set torch's random generators; the one of the GPU only if it was saved and there is a GPU."""
    torch.set_rng_state(_tensor(state["rng"]))
    if state["rng_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["rng_cuda"]))


def _cuda() -> bytes:
    return bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_available() else b""


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
