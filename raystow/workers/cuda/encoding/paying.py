"""Whether chunks are smaller as differences: ``storage.coding.delta`` asks a sample of each, and so does this, of all at once."""

from __future__ import annotations

import math

import torch

from ....storage.coding.chunk import WORTH
from ....storage.coding.delta import GAIN

_AT_ONCE = 64  # chunks: what counting takes is 16 bytes for each byte of a sample


def pays(words: torch.Tensor, base: torch.Tensor, *, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For each chunk whether its difference to a base is smaller by enough, and of that difference which planes are worth coding
    (bool [chunks] and [chunks, planes]). ``words`` and ``base``: the same sample of both (integers [chunks, words]); ``rotate``:
    whether words are rotated when they are coded by themselves."""
    differences = entropies(_difference(words, base))
    alone = entropies(_rotated(words) if rotate else words)
    return _expected(differences) <= GAIN * _expected(alone), differences <= WORTH


def entropies(words: torch.Tensor) -> torch.Tensor:
    """Bits per byte of each byte plane of each chunk's words (float64 [chunks, planes]), with the Miller-Madow correction for the
    size of the sample."""
    return torch.cat([_entropies(some) for some in words.split(_AT_ONCE)])


def _entropies(words: torch.Tensor) -> torch.Tensor:
    (chunks, n), width = words.shape, words.element_size()
    planes = words.contiguous().view(torch.uint8).view(chunks, n, width).long()
    counter = torch.arange(chunks * width, device=words.device).view(chunks, 1, width) * 256 + planes
    counts = torch.zeros(chunks * width * 256, dtype=torch.int32, device=words.device)
    counts.scatter_add_(0, counter.view(-1), torch.ones_like(counter, dtype=torch.int32).view(-1))
    share = counts.view(chunks, width, 256).double() / n
    seen = (share > 0).sum(-1)
    return torch.special.entr(share).sum(-1) / math.log(2) + (seen - 1) / (2 * n * math.log(2))


def _expected(entropies: torch.Tensor) -> torch.Tensor:
    """Bits that a word should take."""
    return torch.where(entropies > WORTH, 8.0, entropies).sum(-1)


def _difference(words: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``storage.coding.kernels.subtract``."""
    signed = words.view(torch.int8) - base.view(torch.int8) if words.dtype is torch.uint8 else words - base
    return (signed << 1) ^ (signed >> (8 * signed.element_size() - 1))


def _rotated(words: torch.Tensor) -> torch.Tensor:
    return (words << 1) | ((words >> (8 * words.element_size() - 1)) & 1)
