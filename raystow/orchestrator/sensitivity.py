"""Measures how a model's loss changes if groups of its tensors are stored with fewer bits; proposes rules for a budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..state.lossy.profiles import KINDS, LEAST, Lossy, kind, suitable
from ..state.lossy.rounded_chunk import round_in_place
from ..state.lossy.rules import MantissaBits, RuleSelector
from ..state.lossy.tensor_roles import role
from ..state.lossy.tensor_values import dtype_name, words_of
from ..state.tree import flatten
from ..storage.arguments import refused
from ..storage.coding import dtypes
from ..storage.coding.chunk import ChunkEncoder
from ..storage.errors import StateError
from ..storage.format.groups import WEIGHTS

if TYPE_CHECKING:
    import torch

_SAMPLE = 1 << 20  # bytes of each tensor that are coded, to see what a rule saves

LEVELS: Mapping[str, Sequence[RuleSelector]] = {
    **{name: [MantissaBits(n) for n in (7, 5, 3, 2, 1)] for name in KINDS},
    **{name: [MantissaBits(n) for n in (16, 12, 9)] for name in (WEIGHTS, "master")},
}
"""The rules that are tried by default."""


@dataclass(frozen=True)
class Trial:
    """The effect of one rule on one group of tensors.

    Attributes:
        group: The group, as in ``Compression(lossy=...)``.
        rule: The rule; None for the tensors unchanged.
        change: The change of the loss.
        raw: Bytes before encoding.
        stored: Bytes after encoding, estimated from a sample of each tensor.
    """

    group: str
    rule: RuleSelector | None
    change: float
    raw: int
    stored: int


@dataclass(frozen=True)
class Proposal:
    """The rules that save the most bytes within a budget.

    Attributes:
        rules: Rules by group, for ``Compression(lossy=...)``.
        change: The predicted change of the loss: the sum of the changes that the rules cause alone.
        raw: Bytes of the groups that were tried, before encoding.
        stored: Bytes after encoding.
    """

    rules: Mapping[str, RuleSelector] = field(default_factory=dict)
    change: float = 0.0
    raw: int = 0
    stored: int = 0


@dataclass(frozen=True)
class Sensitivity:
    """The result of ``sensitivity``.

    Attributes:
        loss: The loss with every bit.
        trained: The loss after ``train``; None without ``train``.
        noise: The difference between two calls of ``train`` from the same state. Smaller changes mean nothing.
        trials: The trials group by group; the first of each group has no rule.
    """

    loss: float
    trained: float | None
    noise: float
    trials: tuple[Trial, ...]

    def propose(self, budget: float) -> Proposal:
        """Choose the rules that give the smallest state within a budget.

        Args:
            budget: The largest predicted change of the loss. Changes in both directions count, each at least as ``noise``.

        Returns:
            The rules, their predicted change and their bytes.
        """
        options: dict[str, list[Trial]] = defaultdict(list)
        for trial in self.trials:
            options[trial.group].append(trial)
        found = [Proposal()]
        for trials in options.values():
            found = _best(self._with(one, trial) for one in found for trial in trials)
            found = [one for one in found if one.change <= budget]
        return min(found, key=lambda one: one.stored, default=Proposal())

    def _with(self, one: Proposal, trial: Trial) -> Proposal:
        rules, change = one.rules, one.change
        if trial.rule is not None:
            rules, change = {**rules, trial.group: trial.rule}, change + max(abs(trial.change), self.noise)
        return Proposal(rules, change, one.raw + trial.raw, one.stored + trial.stored)


def _best(found: Iterable[Proposal]) -> list[Proposal]:
    """The proposals that no other one beats in both size and change."""
    kept = list[Proposal]()
    for one in sorted(found, key=lambda one: (one.change, one.stored)):
        if not kept or one.stored < kept[-1].stored:
            kept.append(one)
    return kept


def sensitivity(
    state: Mapping[str, object],
    *,
    loss: Callable[[], float],
    train: Callable[[], float] | None = None,
    levels: Mapping[str, Sequence[RuleSelector]] | None = None,
) -> Sensitivity:
    """Measure how rounding the tensors of a state changes the loss. Afterwards the state has its original bits.

    If several ranks train together, all of them call this, and all must compute the same losses.

    Args:
        state: The state as given to ``Checkpointer.save``: the model's and the optimizer's own tensors.
        loss: Computes the loss of a few batches, the same at each call.
        train: Takes a few optimizer steps over the same batches at each call, and returns the loss after them. It may change
            only the tensors of ``state`` and gradients. None: only weights are tried, since the optimizer's state has no effect
            before a step.
        levels: The rules to try by kind: ``weights``, ``master``, ``exp_avg``, ``exp_avg_sq``. Weights and master copies are
            tried by role: attention, feed-forward, embeddings, norms, other. None: ``MantissaBits`` with usual numbers of bits.

    Returns:
        The losses and all trials.

    Raises:
        StateError: ``levels`` is invalid, or no tensor of the state can be rounded.
    """
    levels = LEVELS if levels is None else _checked(levels)
    tensors = {leaf.name: leaf.value for leaf in flatten(dict(state)) if leaf.is_tensor and hasattr(leaf.value, "detach")}
    restore, found = _kept(tensors.values()), list[Trial]()
    try:
        before = float(loss())
        trained, noise = None, 0.0
        if train is not None:
            trained = float(train())
            restore()
            noise = abs(float(train()) - trained)
            restore()
        for (what, group), names in _groups(tensors).items():
            if what != WEIGHTS and trained is None:
                continue
            local = {name: _local(tensors[name]) for name in names}
            some = list(local.values())
            found.append(Trial(group, None, 0.0, *_sizes(some)))
            for rule in levels.get(what, ()):
                if any(rule.changes(dtype_name(tensor.dtype)) for tensor in some):
                    for name, tensor in local.items():
                        if (selector := suitable(rule, name)).changes(dtype_name(tensor.dtype)):
                            round_in_place(selector, tensor)
                    sizes = _sizes(some)
                    shown, usual = (loss, before) if what == WEIGHTS or train is None else (train, trained or 0.0)
                    change = float(shown()) - usual
                    restore()
                    found.append(Trial(group, rule, change, *sizes))
    finally:
        restore()
    if not found:
        raise StateError("no tensor can be rounded", subject="state", remedy="use the names that Checkpointer.save would store")
    return Sensitivity(before, trained, noise, tuple(found))


def _checked(levels: Mapping[str, Sequence[RuleSelector]]) -> Mapping[str, Sequence[RuleSelector]]:
    if not isinstance(levels, Mapping):
        raise refused("levels", levels, "a list of rules by kind", "None for the default")
    for what, rules in levels.items():
        if what not in LEVELS or not isinstance(rules, list | tuple):
            raise refused(f"levels[{what!r}]", rules, f"lists of rules, only for these kinds: {', '.join(sorted(LEVELS))}")
        for rule in rules:
            Lossy.of({what: rule})
    return levels


def _groups(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], list[str]]:
    """Names by kind and group, without narrow weights that have a master copy: they are derived from it."""
    follow = any(kind(name) == "master" for name in tensors)
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        what = kind(name)
        if what is None or not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < LEAST:
            continue
        if what == WEIGHTS and follow and tensor.element_size() < 4:
            continue
        found[what, f"{role(name)}.{what}" if what in (WEIGHTS, "master") else what].append(name)
    return dict(sorted(found.items()))


def _kept(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copy tensors and the states of random generators to host memory; return what restores them."""
    import torch

    kept = [(local, local.to("cpu", copy=True)) for local in map(_local, tensors)]
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        for local, copy in kept:
            local.copy_(copy)
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return restore


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, apart from any gradient."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes before encoding, and after it as estimated from a sample of each tensor."""
    encoder, raw, sampled, coded = ChunkEncoder(_SAMPLE), 0, 0, 0
    for tensor in tensors:
        raw += tensor.numel() * tensor.element_size()
        words = tensor.reshape(-1)[: _SAMPLE // tensor.element_size()].contiguous().view(words_of(tensor.element_size()))
        sample = words.cpu().numpy().view(np.uint8)
        sampled += sample.size
        coded += encoder.encode(sample, dtypes.dtype(dtype_name(tensor.dtype)))[0].size
    return raw, round(raw * coded / max(1, sampled))
