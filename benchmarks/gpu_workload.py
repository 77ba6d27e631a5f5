"""The workload of the GPU benchmarks: a language model that is trained, and a description of the machine.

A GPT of 441 million parameters is trained in mixed precision: bf16 weights, an fp32 master copy, two AdamW moments in fp32.
That is 14 bytes per parameter, 6.17 GB, in four groups. The text is Python source found on the machine, as byte-pair tokens. A
step has two parts, ``forward_backward`` and ``update``; a save can overlap with the first and is fenced before the second.

Training runs on a CUDA stream of high priority for every contestant, so other kernels yield to it. Plain copies are not
affected.

A small ``Size`` runs on a CPU, only to test a benchmark; its figures have no meaning.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import report
import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = dict[str, dict[str, Tensor]]

_TEXT = 20_000_000  # characters to train on
_FILES = 1500  # for the tokenizer
_PACKAGES = ("raystow", "torch", "ray", "numpy", "nvidia-libnvcomp-cu12", "torch_checkpointing", "triton")


@dataclass(frozen=True)
class Size:
    """Size of the model and of a micro-batch (``batch`` sequences of ``context`` tokens)."""

    layers: int = 16
    width: int = 1280
    context: int = 512
    batch: int = 24
    vocabulary: int = 16000

    @property
    def heads(self) -> int:
        """Attention heads of 64 dimensions."""
        return max(1, self.width // 64)


def corpus(size: Size, device: torch.device) -> Tensor:
    """Return byte-pair tokens of Python source found on this machine, int32 [n]."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise SystemExit("the text needs a tokenizer: pip install tokenizers") from None
    text, characters = list[str](), 0
    for source in _sources():
        text.append(source)
        characters += len(source)
        if characters > _TEXT:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(text[:_FILES], trainers.BpeTrainer(vocab_size=size.vocabulary, show_progress=False))
    tokens = [token for coded in tokenizer.encode_batch(text) for token in coded.ids]
    return torch.tensor(tokens, dtype=torch.int32, device=device)


def _sources() -> Iterator[str]:
    for folder in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            try:
                yield path.read_text("utf8")
            except (OSError, UnicodeDecodeError):
                continue


class Block(nn.Module):
    """Pre-norm attention and a gated feed-forward layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.qkv, self.gate, self.up):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.out, self.down):
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPT(nn.Module):
    """A GPT whose embedding is tied to its output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks, self.norm = nn.ModuleList(Block(size) for _ in range(size.layers)), nn.RMSNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class Training:
    """Mixed-precision AdamW. The constructor switches the calling thread to a stream of high priority.

    ``data``: the tokens to train on; None: ``corpus``, which takes many seconds.
    """

    def __init__(self, size: Size, device: torch.device, *, data: Tensor | None = None) -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=-5))
        torch.manual_seed(0)
        self.size, self.device, self.step = size, device, 0
        self._data = corpus(size, device) if data is None else data
        self._span = torch.arange(size.context + 1, device=device)
        self._model = GPT(size).to(device, torch.bfloat16)
        self._names = [name for name, _ in self._model.named_parameters()]
        self._weights = list(self._model.parameters())
        self._master = [nn.Parameter(p.detach().float().clone()) for p in self._weights]
        self._master_module = nn.ParameterList(self._master)
        self._optimizer = torch.optim.AdamW(self._master, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run(self, steps: int) -> float:
        """Train whole steps of one micro-batch each; return the last loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self.forward_backward()
            self.update()
        return float(loss.item())

    def forward_backward(self) -> Tensor:
        """Accumulate the gradients of one micro-batch; return the loss, on the device."""
        starts = torch.randint(len(self._data) - self.size.context - 1, (self.size.batch, 1), device=self.device)
        batch = self._data[starts + self._span].long()
        loss = F.cross_entropy(self._model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Apply the optimizer, which changes the tensors of ``state``. Gradients are clipped, so their number does not matter."""
        for weight, master in zip(self._weights, self._master, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._master, 1.0)
        self._optimizer.step()
        self.copy_weights()
        self.step += 1

    def create_moments(self) -> None:
        """Create the optimizer's state before the first step as torch's ``get_state_dict`` does, by a step at rate 0."""
        (group,) = self._optimizer.param_groups
        rate, group["lr"] = group["lr"], 0.0
        for master in self._master:
            master.grad = torch.zeros_like(master)
        self._optimizer.step()
        self._optimizer.zero_grad()
        group["lr"] = rate

    def counts(self) -> dict[str, Tensor]:
        """Return the optimizer's step counters by name, which ``state`` leaves out. Requires a step."""
        return self._named([self._optimizer.state[m]["step"] for m in self._master])

    def copy_weights(self) -> None:
        """Round the master copy to the weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._master)

    @property
    def model(self) -> nn.Module:
        """The model, in bf16."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the master copy."""
        return self._optimizer

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> State:
        """Return the state by group and name, 14 bytes per parameter, without copies. Requires a step."""
        of = self._optimizer.state
        return {
            "weights": self._named([p.detach() for p in self._weights]),
            "master": self._named([m.detach() for m in self._master]),
            "exp_avg": self._named([of[m]["exp_avg"] for m in self._master]),
            "exp_avg_sq": self._named([of[m]["exp_avg_sq"] for m in self._master]),
        }

    def objects(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        """Return the objects that have the tensors of ``state``, and the optimizer's step counters."""
        return {"weights": self._model, "master": self._master_module, "optimizer": self._optimizer}

    def bf16_state(self, batches: int = 6) -> State:
        """Return the weights and their gradients of several micro-batches in bf16, as in low-precision training, with as many
        bytes as ``state``. No tensor equals another one, because raystow stores equal tensors once."""
        state = {"weights": self._named([p.detach() for p in self._weights])}
        for i in range(batches):
            self.forward_backward()
            state[f"gradients{i}"] = self._named([p.grad for p in self._weights if p.grad is not None])
            for weight in self._weights:
                weight.grad = None
        return state

    def _named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, tensors, strict=True))


def tensors_of(state: State) -> list[Tensor]:
    """Return all tensors of a state, in order."""
    return [tensor for group in state.values() for tensor in group.values()]


def nbytes(state: State) -> int:
    """Return the raw bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


def device_named(name: str) -> torch.device:
    """Return the device, or end the run if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU here (or torch was built without CUDA); --device cpu tries the benchmark out")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def about(device: torch.device) -> dict[str, Any]:
    """Describe when and where a benchmark runs, with GPU and software versions."""
    gpu: dict[str, Any] = {"name": "none"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        gpu = {"name": properties.name, "GB": properties.total_memory / 1e9, "driver": driver, "CUDA": torch.version.cuda}
    return {
        "date": report.now(),
        "machine": {
            "gpu": gpu,
            **report.machine(),
            "memory GB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            "nvcomp": _nvcomp(),
            "commit": _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvcomp() -> str | None:
    try:
        from raystow.workers.gpu.nvcomp import version as of_library

        return of_library()
    except Exception:  # it cannot be loaded, for any reason
        return None


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
