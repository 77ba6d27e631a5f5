"""The groups of an optimizer's parameters, if they were saved by another number of optimizers.

Megatron chains two optimizers where experts are spread over ranks, and has one elsewhere. Its state has the groups of each: they
are plain values, such as learning rates and steps, and go to the groups that have the same multipliers.
"""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import StateDict
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from ...state.tree import State
from ...storage.errors import StateError

_EXPERTS = "is_expert_parallel"


def regrouped(saved: StateDict, local: StateDict) -> StateDict:
    """The common state of the saved optimizers as that of the local ones. ``StateError`` if a local group has no counterpart."""
    of_saved, of_local = _chain(saved), _chain(local)
    if not of_saved or not of_local or len(of_saved) == len(of_local):
        return saved
    groups = [group for one in of_saved for group in _groups(one)]
    made = {}
    for number, one in enumerate(of_local):
        like = of_saved[min(number, len(of_saved) - 1)]
        chosen = [_counterpart(group, groups) for group in _groups(one)]
        inner = like.get("optimizer", like)
        with_groups = {**inner, "param_groups": chosen}
        made[number] = {**like, "optimizer": with_groups} if "optimizer" in like else with_groups
    return made if len(made) > 1 else made[0]


def _chain(state: object) -> list[State]:
    if not isinstance(state, dict):
        return []
    numbers = [key for key in state if isinstance(key, int)]
    return [state[number] for number in sorted(numbers)] if numbers else [state]


def _groups(state: State) -> list[State]:
    return list(state.get("optimizer", state).get("param_groups", ()))


def _counterpart(group: State, saved: list[State]) -> State:
    def identity(one: State, *, without: str = "") -> tuple[object, ...]:
        return tuple(one.get(key, one.get(f"pre_{key}")) for key in param_group_identifier_keys if key != without)

    exact = [one for one in saved if identity(one) == identity(group)]
    near = [one for one in saved if identity(one, without=_EXPERTS) == identity(group, without=_EXPERTS)]
    if not near:
        what = "a group of the optimizer's parameters has other multipliers than those saved"
        raise StateError(
            what, subject="optimizer.param_groups", remedy="use the groups of the save, or do not load the optimizer"
        )
    return {**(exact or near)[0], _EXPERTS: group.get(_EXPERTS, False)}
