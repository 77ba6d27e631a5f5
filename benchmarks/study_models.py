"""The models of the training study: a GPT, a GPT with experts, and a frozen GPT with adapters.

The batch of a step depends only on seed and step, and algorithms are deterministic: a run that resumes from a bit-exact state
continues bit for bit.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_workload import GPT, Block, Size, State
from torch import Tensor, nn

_HELD_OUT = 0.05  # fraction of the text
_WARM_UP = 100  # steps
_EVALUATED = 24  # batches


class Experts(nn.Module):
    """Gated feed-forward layers; a router selects two per token."""

    def __init__(self, size: Size, experts: int = 4) -> None:
        super().__init__()
        width = size.width
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02 / (2 * size.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        kept = logits >= logits.topk(2, dim=-1).values[..., -1:]
        weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
        hidden = F.silu(torch.einsum("btw,ewh->beth", x, self.gate)) * torch.einsum("btw,ewh->beth", x, self.up)
        return torch.einsum("beth,ehw,bte->btw", hidden, self.down, weights)


class ExpertBlock(Block):
    """A block of ``GPT`` with experts."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        del self.gate, self.up, self.down
        self.experts = Experts(size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width))
        return x + self.experts(self.norm2(x))


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter (LoRA, Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device) * 0.02)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=layer.weight.dtype, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * (x @ self.a.T) @ self.b.T


def gpt(size: Size) -> nn.Module:
    """Return the model of the GPU benchmarks."""
    return GPT(size)


def moe(size: Size) -> nn.Module:
    """Return the same model with four experts per block."""
    model = GPT(size)
    model.blocks = nn.ModuleList(ExpertBlock(size) for _ in range(size.layers))
    return model


def lora(base: nn.Module) -> nn.Module:
    """Return a copy of a trained GPT in which only adapters of the linear layers are trained."""
    model = copy.deepcopy(base).requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


class Run:
    """Mixed-precision AdamW on one model. The learning rate first rises to ``lr`` and then falls along a cosine to a tenth at
    ``steps``; without ``steps`` it is constant."""

    def __init__(
        self, model: nn.Module, text: Tensor, size: Size, seed: int, *, lr: float = 3e-4, steps: int | None = None
    ) -> None:
        self.model, self.size, self.seed, self.step = model.to(text.device, torch.bfloat16), size, seed, 0
        self._lr, self._steps = lr, steps
        cut = int(len(text) * (1 - _HELD_OUT))
        self._text, self._held_out = text[:cut], text[cut:]
        self._learning = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._master = [p.detach().float().clone().requires_grad_(True) for _, p in self._learning]
        self._optimizer = torch.optim.AdamW(self._master, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def train(self, steps: int) -> Iterator[Tensor]:
        """Yield the loss of each step, on the device."""
        for _ in range(steps):
            loss = self._loss(self._batch(self._text, self.seed * 1_000_003 + self.step))
            loss.backward()
            for (_, weight), master in zip(self._learning, self._master, strict=True):
                master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
                weight.grad = None
            torch.nn.utils.clip_grad_norm_(self._master, 1.0)
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * self._rate()
            self._optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_([weight for _, weight in self._learning], self._master)
            self.step += 1
            yield loss.detach()

    def _rate(self) -> float:
        """Return the learning rate of the next step, relative to the highest."""
        if self._steps is None:
            return 1.0
        fallen = 0.9 * (1 - math.cos(math.pi * min(1.0, self.step / self._steps))) / 2
        return min(1.0, (self.step + 1) / _WARM_UP) * (1 - fallen)

    def evaluate(self) -> float:
        """Return the mean loss over fixed held-out batches."""
        with torch.no_grad():
            losses = [self._loss(self._batch(self._held_out, -1 - i)) for i in range(_EVALUATED)]
        return float(torch.stack(losses).mean())

    def state(self) -> State:
        """Return the state by group and name, without copies. Requires a step."""
        of = self._optimizer.state
        names = [name for name, _ in self._learning]
        return {
            "weights": {name: p.detach() for name, p in self.model.named_parameters()},
            "master": {name: m.detach() for name, m in zip(names, self._master, strict=True)},
            **{
                moment: {name: of[m][moment] for name, m in zip(names, self._master, strict=True)}
                for moment in ("exp_avg", "exp_avg_sq")
            },
        }

    def load(self, state: State, step: int, *, optimizer: bool = True) -> None:
        """Continue from a state at ``step``; without ``optimizer`` from its weights alone, as from a thinned version."""
        with torch.no_grad():
            for group, tensors in self.state().items():
                for name, tensor in tensors.items():
                    if group == "weights" or optimizer:
                        tensor.copy_(state[group][name])
                    elif group == "master":
                        tensor.copy_(state["weights"][name])
                    else:
                        tensor.zero_()
            for counters in self._optimizer.state.values():
                counters["step"].fill_(float(step if optimizer else 0))
        self.step = step

    def _loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())

    def _batch(self, text: Tensor, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number % (1 << 63))
        starts = torch.randint(len(text) - self.size.context - 1, (self.size.batch, 1), generator=generator).to(text.device)
        return text[starts + torch.arange(self.size.context + 1, device=text.device)].long()


def deterministic() -> None:
    """Make all further computation deterministic."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def copied(state: State) -> dict[str, dict[str, Any]]:
    """Return a copy of a state in host memory."""
    return {group: {name: tensor.cpu().clone() for name, tensor in tensors.items()} for group, tensors in state.items()}
