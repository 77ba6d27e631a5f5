"""A small GPT on bytes, trained on the sources of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

CONTEXT = 128
"""Length of a sequence in tokens (bytes)."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """6.5 million parameters at the default size."""

    def __init__(self, width: int = 256, layers: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> Tensor:
    """Return the bytes of the standard library's top-level modules: uint8 [n], n about 7 million."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def batch(data: Tensor, *, step: int, rank: int, size: int) -> Tensor:
    """Return sequences, int64 [size, CONTEXT + 1], that depend on step and rank only, so that a step can be repeated."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
    return data[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
