"""Rounds a chunk on the CPU or a GPU, and checks the error of every number before the chunk is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...storage.coding.dtypes import MANTISSA
from ...storage.coding.rounded import Rounded
from ...storage.errors import SaveFailed
from .rules import Rule, RuleSelector
from .tensor_values import Numbers, dtype_name, words_of

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 1 << 16
"""Numbers that are rounded at a time, on the CPU."""


def rounded(rule: Rule, words: Tensor, dtype: str, first: int = 0, *, at_once: int = AT_ONCE) -> tuple[Tensor, Tensor]:
    """The ``words`` of numbers (integers of their width, [rows, n], contiguous) after rounding, and the ``findings``: float64 [6]
    on the same device, not synchronized. ``first``: see ``Rule.round``. ``at_once``: numbers of a part."""
    import torch

    if words.is_cuda or words.numel() <= at_once:
        return _rounded(rule, words, dtype, first)
    made, findings = torch.empty_like(words), []
    for rows, columns in _parts(words.shape, rule.block, first, at_once):
        made[rows, columns], found = _rounded(rule, words[rows, columns].contiguous(), dtype, first + columns.start)
        findings.append(found)
    return made, combine(torch.stack(findings))


def _parts(shape: tuple[int, int], block: int, first: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a matrix that fit into a core's cache and cut no block."""
    rows, n = shape
    high, wide = max(1, at_once // n), max(1, at_once // block) * block
    for row in range(0, rows, high):
        start = 0
        while start < n:
            end = min(n, start + wide - (first + start) % block)
            yield slice(row, row + high), slice(start, end)
            start = end


def _rounded(rule: Rule, words: Tensor, dtype: str, first: int) -> tuple[Tensor, Tensor]:
    import torch

    values = words.view(getattr(torch, dtype))
    strange = None
    if values.is_cuda or not values.abs().amax().isfinite():  # on a GPU waiting for the answer costs more
        strange = ~values.isfinite()
    before = values if strange is None else values.masked_fill(strange, 0.0)
    after, bound = rule.round(before, first)
    made = after.contiguous().view(words.dtype)
    if strange is not None:
        made = torch.where(strange, words, made)
    exact = torch.promote_types(values.dtype, torch.float32)  # holds the difference exactly
    size, error = before.to(exact).abs(), (before.to(exact) - after.to(exact)).abs()
    findings = (
        (~(error <= bound)).sum(),
        error.amax(),
        (error / size.clamp(min=torch.finfo(values.dtype).smallest_normal)).amax(),
        torch.linalg.vector_norm(size, dtype=torch.float64).square(),
        torch.linalg.vector_norm(error, dtype=torch.float64).square(),
        (zeros(made, dtype) * (made != words)).sum() / 8,
    )
    return made, torch.stack([found.double() for found in findings])


def zeros(words: Tensor, dtype: str) -> Tensor:
    """The number of zero bits at the end of each mantissa."""
    import torch

    mantissa = MANTISSA[dtype]
    rest = words & ((1 << mantissa) - 1) | (1 << mantissa)
    lowest = rest & -rest
    if mantissa > 23:
        return (lowest.double().view(torch.int64) >> 52) - 1023
    return (lowest.float().view(torch.int32) >> 23) - 127


def combine(found: Tensor) -> Tensor:
    """Findings of parts, one in each row, combined: the largest errors, and sums of the rest."""
    total = found.sum(0)
    total[1:3] = found[:, 1:3].amax(0)
    return total


def check(name: str, rule: Rule, findings: Iterable[Tensor]) -> Rounded:
    """Combine the findings of a tensor's chunks; waits for them. ``SaveFailed`` if an error exceeds its bound."""
    import torch

    found = list(findings)
    # On a stream of its own: the queue of the training's stream would delay it, and the findings are complete by now.
    stream = torch.cuda.stream(torch.cuda.Stream(found[0].device)) if found[0].is_cuda else contextlib.nullcontext()
    with stream:
        broken, error, relative, signal, noise, spared = combine(torch.stack(found).cpu()).tolist()
    if broken:
        what = f"{rule} has changed {broken:.0f} numbers by more than its bound, or the tensor was changed during the save"
        raise SaveFailed(
            what, subject=name, remedy="call fence() before changing tensors; if you do, save without lossy= and report this"
        )
    return Rounded(str(rule), error, relative, signal, noise, int(spared))


def round_in_place(selector: RuleSelector, tensor: Tensor) -> None:
    """Round a torch tensor as a save would."""
    values, dtype = tensor.detach(), dtype_name(tensor.dtype)
    if not values.numel():  # the part of a rank can be empty
        return
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous().view(words_of(values.element_size()))
    rule = selector.choose(lambda: Numbers("tensor", dtype, rows, [((0, 0), tuple(rows.shape))]))
    if rule is not None:
        bits, _ = rounded(rule, rows, dtype)
        values.copy_(bits.view(values.dtype).view(values.shape))
