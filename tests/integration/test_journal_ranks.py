"""Steps recorded by N gloo ranks are replayed by M ranks, bit for bit or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.journal_port import BoxPort, EntryBox
from helpers.processes import incarnation
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from integration.gloo import Ranks
from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.recorder import JournalIdentity, StepRecorder
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import EntryInfo, JournalChoice, JournalVote

Entries = dict[EntryInfo, bytes]
STEPS = 17  # entry 16 has digests of all bytes

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


class GlooPort(BoxPort):
    """A ``JournalPort`` whose ranks vote together; rank 0 acts as the coordinator. ``end``: the reason why the replay ended."""

    end = ""

    def settle(self, vote: JournalVote) -> JournalChoice:
        votes: list[Any] = [None] * vote.world_size
        dist.gather_object(vote, votes if vote.rank == 0 else None)
        answer: list[Any] = [None]
        answers: list[Any] | None = None
        if vote.rank == 0:
            rounds = [self._box.rounds.vote(one, self._box.held) for one in votes]
            answers = [rounds[-1].answer(one) for one in votes]
        dist.scatter_object_list(answer, answers)
        choice: JournalChoice = answer[0]
        self.end = choice.end or self.end
        return choice


def build(layout: str, optimizer: str, rank: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 129), nn.ReLU(), nn.Linear(129, 70), nn.ReLU(), nn.Linear(70, 3))
    if layout != "whole":
        shape, names = ((world,), ("shard",)) if layout == "fsdp" else ((2, world // 2), ("copies", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(
    rank: int, world: int, layout: str, optimizer: str, entries: Entries, steps: Sequence[int], spoil: str = ""
) -> tuple[Any, Entries, list[bytes], str]:
    """Replay ``entries``, and record ``steps``. Return the replayed values, the rank's new entries, all bits at the end, and the
    reason why the replay ended.

    ``spoil``: the disturbance of the replay on the last rank.
    """
    box = EntryBox()
    box.entries.update(entries)
    model, opt = build(layout, optimizer, rank, world)
    disturb(spoil if rank == world - 1 else "", box, model, opt)
    port, who = GlooPort(box), JournalIdentity("memory://box", "box", rank, world, incarnation(SYSTEM.token()), 30.0)
    journal = Journal(StepRecorder(TrackedState(model, [opt]), port, who))  # type: ignore[arg-type]
    values = journal.replay()
    generator = torch.Generator().manual_seed(world)
    for number in steps:
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = like(parameter, whole)
        opt.step()
        journal.record(number, values={"step": number, "rank": rank})
    journal.close()
    return values, {info: data for info, data in box.entries.items() if info not in entries}, bits(model, opt), port.end


def like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else whole


def disturb(spoil: str, box: EntryBox, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    calls = 0

    def change(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            local = next(model.parameters()).detach()
            getattr(local, "_local_tensor", local)[-1, 0] += 1

    if spoil == "step":
        opt.register_step_post_hook(change)
    elif spoil == "base":
        calls = 3
        change()


def bits(model: nn.Module, opt: torch.optim.Optimizer) -> list[bytes]:
    tensors: list[Any] = list(model.parameters())
    for parameter in model.parameters():
        state = opt.state.get(parameter, {})
        tensors += [state[key] for key in sorted(state)]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [one.detach().numpy().tobytes() if isinstance(one, torch.Tensor) else repr(one).encode() for one in whole]


def recorded(ranks: Ranks, world: int, layout: str, optimizer: str, steps: int = STEPS) -> tuple[Entries, list[bytes]]:
    found = ranks.call(world, train, layout, optimizer, {}, range(1, steps + 1))
    return {info: data for _, entries, _, _ in found for info, data in entries.items()}, found[0][2]


def check(ranks: Ranks, optimizer: str, source: tuple[int, str], target: tuple[int, str]) -> None:
    entries, end = recorded(ranks, *source, optimizer)
    for values, _, found, _ in ranks.call(target[0], train, target[1], optimizer, entries, ()):
        assert values == {"step": STEPS, "rank": 0}
        assert found == end


def test_other_ranks_replay_bit_for_bit(ranks: Ranks) -> None:
    check(ranks, "adamw", (2, "fsdp"), (3, "fsdp"))


def test_steps_of_several_world_sizes_are_replayed(ranks: Ranks) -> None:
    """Record four steps on 3 ranks and two on 2 ranks, and replay all on 3 ranks, without a version in between."""
    entries, _ = recorded(ranks, 3, "fsdp", "adamw", 4)
    second = ranks.call(2, train, "fsdp", "adamw", entries, (5, 6))
    for _, theirs, _, _ in second:
        entries.update(theirs)
    for values, _, found, _ in ranks.call(3, train, "fsdp", "adamw", entries, ()):
        assert values == {"step": 6, "rank": 0}
        assert found == second[0][2]


@pytest.mark.parametrize(("spoil", "reached"), [("step", 3), ("base", None)])
def test_an_error_within_a_shard_of_another_layout_ends_replay(spoil: str, reached: int | None, ranks: Ranks) -> None:
    """The disturbed rank has a part of a recorded shard, so only the sum over all ranks differs."""
    entries, _ = recorded(ranks, 2, "fsdp", "adamw", 6)
    _, expected = recorded(ranks, 2, "fsdp", "adamw", reached or 0)
    found = ranks.call(3, train, "fsdp", "adamw", entries, (), spoil)
    assert [values and values["step"] for values, _, _, _ in found] == [reached] * 3
    if reached:
        assert all(end == expected for _, _, end, _ in found)
    assert all(found[0][2] == end for _, _, end, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw-fused"])
def test_every_optimizer_replays_on_other_ranks(optimizer: str, ranks: Ranks) -> None:
    check(ranks, optimizer, (2, "fsdp"), (3, "fsdp"))


LAYOUTS = [
    ((3, "fsdp"), (1, "whole")),
    ((1, "whole"), (2, "fsdp")),
    ((4, "hsdp"), (3, "fsdp")),
    ((3, "fsdp"), (4, "hsdp")),
    ((3, "whole"), (2, "whole")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), LAYOUTS)
def test_other_layouts_replay_bit_for_bit(source: tuple[int, str], target: tuple[int, str], ranks: Ranks) -> None:
    check(ranks, "adamw", source, target)


@pytest.mark.slow
def test_fused_optimizers_on_other_ranks_end_at_an_exact_step(ranks: Ranks) -> None:
    """On CPUs, the fused AdamW rounds the last elements of a tensor differently, and each world size has other last elements."""
    entries, _ = recorded(ranks, 2, "fsdp", "adamw-fused")
    found = ranks.call(3, train, "fsdp", "adamw-fused", entries, ())
    (reached,) = {0 if values is None else values["step"] for values, _, _, _ in found}
    assert all(end == recorded(ranks, 2, "fsdp", "adamw-fused", reached)[1] for _, _, end, _ in found)
