"""Which tensors are rounded by which rule: as the user specifies, or by a measured profile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...storage.arguments import refused
from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.format.groups import WEIGHTS, group
from .rules import Blockwise, MantissaBits, RuleSelector
from .sqnr import Sqnr
from .tensor_roles import role

LEAST = 4096
"""Bytes. Smaller tensors are not rounded: they save nothing, and a loss scale or counter may be among them."""

_MOMENTS = ("exp_avg", "momentum_buffer")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
KINDS = ("master", *_MOMENTS, *_SQUARES)
"""Torch's names of the optimizer state of each weight."""

PROFILES: Mapping[str, Mapping[str, RuleSelector]] = {
    "resume-bounded": {
        **dict.fromkeys((WEIGHTS, "master"), MantissaBits(16)),
        **dict.fromkeys((*_MOMENTS, *_SQUARES), MantissaBits(5)),
    },
    "archive": {
        **dict.fromkeys((WEIGHTS, "master"), MantissaBits(9)),
        **dict.fromkeys((*_MOMENTS, *_SQUARES), MantissaBits(1)),
    },
}
"""``resume-bounded``: for resuming. ``archive``: for evaluation; bfloat16 weights keep every bit, the optimizer state few."""


def kind(name: str) -> str | None:
    """``weights``, or one of ``KINDS``; None for any other state of an optimizer."""
    if group(name) == WEIGHTS:
        return WEIGHTS
    return next((part for part in reversed(name.lower().split(".")) if part in KINDS), None)


def suitable(selector: RuleSelector, name: str) -> RuleSelector:
    """The rule for a tensor: blocks, whose small numbers become zero, are used for first moments only. The optimizer divides by
    second moments, weights are derived from their master copy, and the meaning of other tensors is unknown."""
    return replace(selector, blocks=()) if isinstance(selector, Sqnr) and kind(name) not in _MOMENTS else selector


@dataclass(frozen=True)
class Lossy:
    """``rules`` by group: a part of tensors' names (``exp_avg``), ``weights`` (all tensors that are not the optimizer's), a role
    in the model (``attention``; see ``tensor_roles``), or several of these joined by dots (``attention.exp_avg``), which must all
    match. The key with the most parts wins. ``profile``: its name, or empty."""

    rules: Mapping[str, RuleSelector]
    profile: str = ""

    @staticmethod
    def of(lossy: Lossy | Mapping[str, RuleSelector] | str | None) -> Lossy:
        """The rules of a user's argument; ``StateError`` if it is invalid."""
        if isinstance(lossy, Lossy):
            return lossy
        if isinstance(lossy, str) and lossy in PROFILES:
            return Lossy(PROFILES[lossy], lossy)
        rules = {} if lossy is None else lossy
        if not isinstance(rules, Mapping):
            what = f"lossy={lossy!r} is not a profile" if isinstance(lossy, str) else f"lossy is {lossy!r:.80}"
            raise StateError(what, remedy=f"choose {' or '.join(PROFILES)}, or give rules by group")
        for name, rule in rules.items():
            if not isinstance(name, str):
                raise refused("a group of lossy", name, "its name as text")
            if not isinstance(rule, MantissaBits | Blockwise | Sqnr):
                remedy = "use MantissaBits, Blockwise or Sqnr"
                raise StateError(f"{rule!r} is not a rule", subject=f"lossy[{name!r}]", remedy=remedy)
            if isinstance(rule, Blockwise) and set(name.lower().split(".")) & {*_SQUARES}:
                what = "small second moments of a block would become zero, and the optimizer divides by their root"
                raise StateError(what, subject=f"lossy[{name!r}]", remedy="use MantissaBits")
        return Lossy({name.lower(): rule for name, rule in rules.items()})

    def group(self, name: str) -> str | None:
        """The key of the rule for a tensor; None if there is none."""
        if not self.rules:
            return None
        labels = {*name.lower().split("."), role(name), *((WEIGHTS,) if group(name) == WEIGHTS else ())}
        fitting = [key for key in self.rules if labels.issuperset(key.split("."))]
        return max(fitting, key=lambda key: key.count("."), default=None)

    def selector(self, name: str, dtype: str, shape: Iterable[int]) -> RuleSelector | None:
        """The rule for a tensor; None to keep every bit."""
        key = self.group(name)
        if key is None or math.prod(shape) * dtypes.dtype(dtype).itemsize < LEAST:
            return None
        selector = suitable(self.rules[key], name)
        return selector if selector.changes(dtype) else None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The groups without any of these tensors."""
        return sorted({*self.rules} - {self.group(name) for name in names})

    def texts(self) -> dict[str, str]:
        """Each group's rule as text."""
        return {key: str(rule) for key, rule in self.rules.items()}

    def __str__(self) -> str:
        rules = ", ".join(f"{key}: {rule}" for key, rule in self.rules.items())
        return f"{self.profile} ({rules})" if self.profile else rules
