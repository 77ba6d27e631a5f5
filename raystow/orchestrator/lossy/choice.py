"""Which tensors are rounded, and how: as the user says, or by a profile that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.format.groups import WEIGHTS, group
from ..roles import role
from .rules import Asked, Blockwise, MantissaBits
from .sqnr import Sqnr

LEAST = 4096
"""Bytes; in smaller tensors there is nothing to gain, and a loss scale or a counter may be among them."""

_MOMENTS = ("exp_avg", "momentum_buffer")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
KINDS = ("master", *_MOMENTS, *_SQUARES)
"""What an optimizer keeps for each weight, by the names that torch gives it."""

PROFILES: Mapping[str, Mapping[str, Asked]] = {
    "resume-bounded": {
        **dict.fromkeys((WEIGHTS, "master"), MantissaBits(16)),
        **dict.fromkeys((*_MOMENTS, *_SQUARES), MantissaBits(5)),
    },
    "archive": {
        **dict.fromkeys((WEIGHTS, "master"), MantissaBits(9)),
        **dict.fromkeys((*_MOMENTS, *_SQUARES), MantissaBits(1)),
    },
}
"""``resume-bounded``: to train on from. ``archive``: to evaluate; weights in bfloat16 are kept bit for bit, and a sketch of the
optimizer's state."""


def kind(name: str) -> str | None:
    """``weights``, or one of ``KINDS``; None for what else there may be in an optimizer's state."""
    if group(name) == WEIGHTS:
        return WEIGHTS
    return next((part for part in reversed(name.lower().split(".")) if part in KINDS), None)


def suited(asked: Asked, name: str) -> Asked:
    """To a tensor: blocks, whose small numbers become zero, are for first moments alone. The optimizer divides by second moments,
    weights follow from their master copy, and of others nothing is known."""
    return replace(asked, blocks=()) if isinstance(asked, Sqnr) and kind(name) not in _MOMENTS else asked


@dataclass(frozen=True)
class Lossy:
    """``rules`` by what they are for: a part of tensors' names (``exp_avg``), ``weights`` (all that is not the optimizer's), a
    role in the model (``attention``; see ``roles``), or several of these with dots between (``attention.exp_avg``): then all must
    fit. The key with most of them wins. ``profile``: its name, or nothing."""

    rules: Mapping[str, Asked]
    profile: str = ""

    @staticmethod
    def of(asked: Lossy | Mapping[str, Asked] | str | None) -> Lossy:
        """What a user asks for; ``StateError`` if that cannot be."""
        if isinstance(asked, Lossy):
            return asked
        if isinstance(asked, str):
            if asked not in PROFILES:
                raise StateError(
                    f"lossy={asked!r} is no profile", remedy=f"choose {' or '.join(PROFILES)}, or say a rule by group"
                )
            return Lossy(PROFILES[asked], asked)
        if asked is not None and not isinstance(asked, Mapping):
            raise StateError(f"lossy is {asked!r:.80}", remedy=f"choose {' or '.join(PROFILES)}, or say a rule by group")
        for name, rule in (asked or {}).items():
            if not isinstance(rule, MantissaBits | Blockwise | Sqnr):
                remedy = "use MantissaBits, Blockwise or Sqnr"
                raise StateError(f"{rule!r} is no rule", subject=f"lossy[{name!r}]", remedy=remedy)
            if isinstance(rule, Blockwise) and set(name.lower().split(".")) & {*_SQUARES}:
                what = "the optimizer divides by the root of second moments, and small ones of a block would become zero"
                raise StateError(what, subject=f"lossy[{name!r}]", remedy="use MantissaBits")
        return Lossy({name.lower(): rule for name, rule in (asked or {}).items()})

    def group(self, name: str) -> str | None:
        """The key whose rule is for a tensor; None if there is none."""
        if not self.rules:
            return None
        labels = {*name.lower().split("."), role(name), *((WEIGHTS,) if group(name) == WEIGHTS else ())}
        fitting = [key for key in self.rules if labels.issuperset(key.split("."))]
        return max(fitting, key=lambda key: key.count("."), default=None)

    def asked(self, name: str, dtype: str, shape: Iterable[int]) -> Asked | None:
        """What is asked for a tensor; None if it is stored as it is."""
        key = self.group(name)
        if key is None or math.prod(shape) * dtypes.dtype(dtype).itemsize < LEAST:
            return None
        asked = suited(self.rules[key], name)
        return asked if asked.changes(dtype) else None

    def idle(self, names: Iterable[str]) -> list[str]:
        """The groups to which none of these tensors belongs."""
        return sorted({*self.rules} - {self.group(name) for name in names})

    def told(self) -> dict[str, str]:
        """For people: each group's rule."""
        return {key: str(rule) for key, rule in self.rules.items()}

    def __str__(self) -> str:
        rules = ", ".join(f"{key}: {rule}" for key, rule in self.rules.items())
        return f"{self.profile} ({rules})" if self.profile else rules
