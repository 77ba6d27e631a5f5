"""Ranks that train a small model with DeepSpeed: processes of a gloo group that are also drivers of the tests' Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from torch import nn

from integration.gloo import Ranks

STATES = ("exp_avg", "exp_avg_sq")
PATIENCE = 300.0  # seconds: the first process compiles a DeepSpeed operator
WIDTH = 6001  # makes parts of the weights larger than the data that `save` copies


class Net(nn.Module):
    """A model with sizes that no number of ranks divides, a one-element parameter, tied and frozen parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(13, WIDTH), nn.LayerNorm(WIDTH)
        self.down, self.tied = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7, bias=False)
        self.tied.weight = self.down.weight
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.norm(self.up(x.to(self.up.weight.dtype)).relu())
        return (self.frozen(self.down(hidden) + self.tied(hidden)) * self.scale).float().square().mean()


def config(stage: int, dtype: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a DeepSpeed configuration. ``options``: entries of ``zero_optimization``; ``data_types`` becomes an entry of its
    own."""
    zero = dict(options or {})
    types = {"data_types": zero.pop("data_types")} if "data_types" in zero else {}
    of = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, **zero}, **types}
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    precision: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        precision = {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 3, "hysteresis": 1}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    force = {"zero_force_ds_cpu_optimizer": False}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, "scheduler": schedule, **of, **precision, **force}


def engine_of(rank: int, n: int, settings: dict[str, Any], seed: int = 0) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    _replace_fused_kernel()
    type(get_accelerator()).is_fp16_supported = lambda self: True  # torch computes fp16 on CPUs; DeepSpeed's default is False
    torch.manual_seed(seed)
    model, settings = Net(), dict(settings)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = settings.pop("groups", 0)  # the parameters of the optimizer in so many groups
    grouped = [{"params": parameters[n::count]} for n in range(count)] or None
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=grouped)
    return engine


def _replace_fused_kernel() -> None:
    """Let ``FusedAdam`` compute without a GPU."""
    from deepspeed.ops.adam import fused_adam

    def apply(op: Any, flag: Any, tensors: Any, lr: float, b1: float, b2: float, eps: float, step: int, *_: Any) -> None:
        for gradient, weight, mean, square in zip(*tensors, strict=True):
            mean.mul_(b1).add_(gradient, alpha=1 - b1)
            square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            weight.sub_(lr * (mean / (1 - b1**step)) / ((square / (1 - b2**step)).sqrt() + eps))

    fused_adam.FusedAdamBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=None))
    fused_adam.multi_tensor_applier = apply


def train(engine: Any, steps: int) -> list[str]:
    """Train ``steps`` steps on data that depend on the step and the rank; return the losses as hexadecimal floats."""
    losses = []
    for _ in range(steps):
        data = torch.Generator().manual_seed(100 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(2, 13, generator=data))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def digests(engine: Any) -> dict[str, str]:
    """Return digests of the weights and the optimizer state. DeepSpeed's own functions gather them from all ranks."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, parameter in engine.module.named_parameters():
            found[name] = _digest(parameter)
    for name, buffer in engine.module.named_buffers():
        found[name] = _digest(buffer)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name}.master"] = _digest(safe_get_full_fp32_param(parameter))
            for key in STATES:
                found[f"{name}.{key}"] = _digest(safe_get_full_optimizer_state(parameter, key))
    groups = engine.optimizer.optimizer.param_groups
    counters = engine.global_steps, engine.skipped_steps, engine.lr_scheduler.state_dict(), [group["lr"] for group in groups]
    found["progress"] = repr((counters, vars(getattr(engine.optimizer, "loss_scaler", None) or object)))
    return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def attached(rank: int, n: int, address: str, uri: str, settings: dict[str, Any], what: Callable[..., Any], *args: Any) -> Any:
    """Call ``what(engine, *args)`` with an engine that is attached to a repository, and return its result.

    Other stages and numbers of ranks begin with other weights: a weight that is not restored differs, also if it is frozen.
    """
    import raystow.deepspeed

    ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    engine = engine_of(rank, n, settings, seed=10 * n + settings["zero_optimization"]["stage"])
    with raystow.deepspeed.attach(engine, uri):
        result = what(engine, *args)
    ray.shutdown()
    return result


@contextlib.contextmanager
def new_ranks(folder: Path) -> Iterator[Ranks]:
    """Yield ranks in new processes, because DeepSpeed keeps the process groups of earlier runs."""
    folder.mkdir()
    ranks = Ranks(folder)
    try:
        yield ranks
    finally:
        ranks.close()


def run(folder: Path, n: int, *args: Any) -> list[Any]:
    """Call ``attached(*args)`` on ``n`` new processes, and return their results."""
    with new_ranks(folder) as ranks:
        return ranks.call(n, attached, *args, timeout=PATIENCE)
