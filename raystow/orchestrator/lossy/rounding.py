"""Rounds a chunk where it lies, on the CPU or a GPU, and looks at every number of it again before anyone stores it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...storage.errors import SaveFailed
from ...storage.rounded import Rounded
from .rules import MANTISSA, Rule, words_of


def rounded(rule: Rule, words: Any, dtype: str, first: int = 0) -> tuple[Any, Any]:
    """The ``words`` of numbers (integers of their width, [rows, n], contiguous) after rounding, and the ``findings``: float64 [6]
    on the same device, which nobody has waited for. ``first``: see ``Rule.round``."""
    import torch

    values = words.view(getattr(torch, dtype))
    made, bound = rule.round(values, first)
    before, after, finite = values.double(), made.double(), values.isfinite()
    error = torch.where(finite, (before - after).abs(), 0.0)
    size = torch.where(finite, before.abs(), 0.0)
    bits = made.contiguous().view(words.dtype)
    broken = torch.where(finite, ~(error <= bound), bits != words)
    findings = (
        broken.sum(),
        error.max(),
        (error / size.clamp(min=torch.finfo(values.dtype).smallest_normal)).max(),
        size.square().sum(),
        error.square().sum(),
        _spared(words, bits, dtype) / 8,
    )
    return bits, torch.stack([found.double() for found in findings])


def _spared(words: Any, bits: Any, dtype: str) -> Any:
    """How many bits at the end of all mantissas are zeros, where rounding has changed them."""
    import torch

    mantissa = MANTISSA[dtype]
    rest = (bits & ((1 << mantissa) - 1)) | (1 << mantissa)
    _, zeros = torch.frexp((rest & -rest).double())
    return torch.where(bits != words, zeros - 1, 0).sum()


def read(name: str, rule: Rule, findings: Iterable[Any]) -> Rounded:
    """What all findings of a tensor's chunks come to; waits for them. ``SaveFailed`` naming it if an error exceeds its bound."""
    import torch

    found = torch.stack(list(findings)).cpu()
    (broken, *_, signal, noise, spared), (_, error, relative, *_) = found.sum(0).tolist(), found.amax(0).tolist()
    if broken:
        what = f"{rule} has changed {broken:.0f} numbers by more than it may, or they changed meanwhile"
        raise SaveFailed(
            what, subject=name, remedy="call fence() before anything changes it; else save without lossy=, and report it"
        )
    return Rounded(str(rule), error, relative, signal, noise, int(spared))


def round_in_place(rule: Rule, tensor: Any) -> None:
    """Round a torch tensor as a save would."""
    values = tensor.detach()
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    bits, _ = rounded(rule, rows.view(words_of(values.element_size())), str(values.dtype).removeprefix("torch."))
    values.copy_(bits.view(values.dtype).view(values.shape))
