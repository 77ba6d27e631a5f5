"""Where ZeRO keeps what one rank has of each parameter: ranges of flat tensors, which its optimizer changes in place.

ZeRO 1 and 2 concatenate the parameters of a group, pad, and give each rank an equal range: ``_hp_mapping`` of a parameter says
which of its elements are in this rank's range. ZeRO 3 gives each rank an equal range of each padded parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed

from ...state.box import Boxes
from ...state.tree import State

Engine: TypeAlias = Any
"""A ``deepspeed.DeepSpeedEngine``, or one of its parts, which are not typed."""


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer's group of parameters. ``flats``: this rank's fp32 ranges of it; the optimizer keeps moments for each."""

    parameters: tuple[torch.nn.Parameter, ...]
    options: State
    flats: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ParameterPartition:
    """This rank's range of a parameter, whose elements begin at ``at`` in ``flat``. ``weights``: as the model computes with them.
    A frozen parameter has no ``flat``."""

    shape: tuple[int, ...]
    start: int
    weights: torch.Tensor
    flat: torch.Tensor | None = None
    at: int = 0

    def boxes(self, of: torch.Tensor | None = None) -> Boxes:
        """The range of ``weights``, or that of a tensor like ``flat``."""
        size = self.weights.numel()
        return Boxes.of_range(self.weights if of is None else of.detach()[self.at : self.at + size], self.shape, self.start)


def groups(engine: Engine) -> Iterator[ParameterGroup]:
    """The groups of parameters, in the order of the optimizer."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        for number, options in enumerate(zero.optimizer.param_groups):
            own = [i for i in range(len(zero.fp16_groups)) if zero.sub_group_to_group_id[i] == number]
            parameters = tuple(parameter for i in own for parameter in zero.fp16_groups[i])
            yield ParameterGroup(parameters, options, tuple(zero.fp32_partitioned_groups_flat[i] for i in own))
        return
    if hasattr(zero, "bf16_groups"):  # ZeRO 1 with bf16 weights and fp32 gradients
        parts = zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True)
    else:
        parts = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
    for options, (parameters, flat) in zip(zero.optimizer.param_groups, parts, strict=True):
        yield ParameterGroup(tuple(parameters), options, (flat,))


def partition_of(engine: Engine, parameter: torch.nn.Parameter, flats: tuple[torch.Tensor, ...]) -> ParameterPartition:
    """This rank's range of a parameter. ``flats``: of its group; none if it is frozen."""
    if engine.zero_optimization_stage() == 3:
        return _of_stage_3(engine.optimizer, parameter, trained=bool(flats))
    shape, words = tuple(parameter.shape), parameter.detach().view(-1)
    (flat,) = flats
    mapping = parameter._hp_mapping
    if mapping is None:  # all of its elements are in the ranges of other ranks
        return ParameterPartition(shape, 0, words[:0], flat)
    start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    return ParameterPartition(shape, start, words[start : start + size], flat, mapping.hp_fragment_address.start)


def _of_stage_3(zero: Engine, parameter: Engine, *, trained: bool) -> ParameterPartition:
    padded, whole = parameter.partition_numel(), parameter.ds_numel
    start = distributed.get_rank(parameter.ds_process_group) * padded
    weights = parameter.ds_tensor.detach().view(-1)[: max(0, min(padded, whole - start))]
    shape, start = tuple(parameter.ds_shape), start if weights.numel() else 0
    if not trained:
        return ParameterPartition(shape, start, weights)
    number, at, _ = zero.grad_position[zero.get_param_id(parameter)]
    return ParameterPartition(shape, start, weights, zero.fp32_partitioned_groups_flat[number], at)
