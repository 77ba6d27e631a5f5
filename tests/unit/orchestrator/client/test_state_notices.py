"""Notices about a state at its first saves: what a restart would miss, and states about which there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.wrapper_classes import Quantized
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

import raystow
from raystow.orchestrator.client.state_notices import StateNotices
from raystow.orchestrator.restore.fresh_start import FreshStart
from raystow.orchestrator.restore.name_patterns import STRICT, NameRules
from raystow.state.assignment import GpuCoding
from raystow.state.objects import ObjectTree
from raystow.state.omissions import SavedState
from raystow.state.planner import plan_save
from raystow.state.value_text import dumps

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")

State = dict[str, Any]


class Saves:
    """The saves of one rank. ``into``: of a restore that has found no version."""

    def __init__(self, into: State | None = None, rules: NameRules = STRICT, rank: int = 0) -> None:
        fresh = None if into is None else FreshStart.of(ObjectTree(into, what="into").into(), rules)
        self._notices, self._rank = StateNotices(rank, SimpleNamespace(fresh=fresh)), rank  # type: ignore[arg-type]

    def save(self, state: State, step: int = 1) -> list[str]:
        """The notices about a save."""
        found = list[str]()
        plan = plan_save(state, rank=self._rank, world_size=self._rank + 1, gpus=GpuCoding(False))
        self._notices.report(found.append, SavedState(state, plan), step)
        return found


def about(state: State) -> list[str]:
    return Saves().save(state)


class Training:
    """A model, an optimizer and a scheduler that have made ``steps`` steps."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, *, steps: int = 1, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        for _ in range(steps):
            self.model(torch.ones(2, 4)).square().mean().backward()
            self.optimizer.step()

    def objects(self, **more: Any) -> State:
        return {"model": self.model, "optim": self.optimizer, **more}

    def dicts(self, **more: Any) -> State:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), **more}


class Signs(torch.optim.Optimizer):
    """Makes no state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Lion(Signs):
    """Makes state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("average", torch.zeros_like(parameter))


# An optimizer without state


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, Lion])
def test_an_optimizer_without_state_is_noticed(make: Callable[..., Any]) -> None:
    new = Training(make, steps=0)
    if new.optimizer.state:
        new.optimizer.state.clear()  # Adagrad makes it at once
    (notice,) = about(new.objects())
    assert notice.startswith('state["optim"] is an optimizer without state')
    assert "save after its first step" in notice
    if make is not Lion:
        assert about({"inner": new.dicts()}) == [notice.replace('state["optim"]', 'state["inner"]["optim"]')]


def test_momentum_makes_state() -> None:
    new = Training(torch.optim.SGD, steps=0, momentum=0.9)
    assert len(about(new.objects())) == len(about(new.dicts())) == 1
    assert len(about(new.optimizer.state_dict())) == 1


@pytest.mark.parametrize("make", [torch.optim.SGD, Signs])
def test_optimizers_that_make_no_state_are_right(make: Callable[..., Any]) -> None:
    for steps in (0, 1):
        training = Training(make, steps=steps)
        assert not training.optimizer.state_dict()["state"]
        assert about(training.objects()) == about(training.dicts()) == []


def test_an_optimizer_of_frozen_parameters_is_right() -> None:
    frozen = Training(steps=0)
    frozen.model.requires_grad_(False)
    assert about(frozen.objects()) == []


def test_an_optimizer_has_no_state_before_the_first_step() -> None:
    saves, new = Saves(), Training(steps=0)
    assert saves.save(new.objects(), step=0) == []
    assert len(saves.save(new.objects(), step=1)) == 1
    assert about(Training().objects()) == about(Training().dicts()) == []


# A schedule


def test_a_schedule_that_is_not_saved_is_noticed() -> None:
    training = Training()
    scheduler = lr_scheduler.CosineAnnealingLR(training.optimizer, 10)
    weights, moments = get_state_dict(training.model, training.optimizer)
    flat = get_state_dict(training.model, training.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    for state in (training.objects(), training.dicts(), {"model": weights, "optim": moments}, {"optim": flat}):
        (notice,) = about(state)
        assert 'the parameter groups of state["optim"] have initial_lr' in notice
        assert "add the scheduler to the state" in notice
    assert len(about({"runs": [training.dicts()]})) == 1
    for saved in (scheduler, scheduler.state_dict(), {"epoch": 3, "inner": [scheduler.state_dict()]}):
        assert about(training.objects(schedule=saved)) == about(training.dicts(schedule=saved)) == []
        assert about(training.objects(progress=raystow.PerRank(saved))) == []


def test_a_schedule_in_a_text_or_of_another_library_is_found() -> None:
    class Warmup:
        """As those of timm: no torch scheduler, and other keys."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> State:
            return {"warmup": 3}

        def load_state_dict(self, state: State) -> None:
            raise AssertionError

    training = Training()
    scheduler = lr_scheduler.StepLR(training.optimizer, 3)
    assert about(training.dicts(trainer=dumps({"schedulers": [scheduler.state_dict()]}))) == []
    assert about(training.objects(warm=Warmup(training.optimizer))) == []
    assert len(about(training.dicts(trainer=dumps({"epoch": 1})))) == 1


def test_groups_without_a_schedule_are_right() -> None:
    training = Training()
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert about(training.objects()) == about(training.dicts()) == []


# Random generators


def dropping() -> dict[str, nn.Module]:
    """Modules that draw random numbers, by what is particular about them."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.dropout = nn.Linear(2, 2), 0.1

    return {
        "a layer": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)),
        "feature maps": nn.Dropout2d(0.5),
        "an encoder": nn.TransformerEncoderLayer(8, 2, dropout=0.1),
        "attention": nn.MultiheadAttention(8, 2, dropout=0.1),
        "recurrent": nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        "a rate": Own(),
        "a wrapper": AveragedModel(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))),
    }


@pytest.mark.parametrize("which", dropping())
def test_dropout_without_generators_is_noticed(which: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), dropping()[which])
    (notice,) = about({"parts": [nn.Linear(2, 2), model]})
    assert notice.startswith('state["parts"][1] has dropout, but no random generators are in the state')
    assert 'add "rng": raystow.Rng()' in notice
    assert about({"model": model.eval()}) == []


def test_models_without_dropout_need_no_generators() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, dropout=0.0)
    single = nn.GRU(2, 2, num_layers=1)
    single.dropout = 0.1  # between layers only
    assert about({"linear": nn.Linear(2, 2), "off": nn.Dropout(0.0), "encoder": encoder, "single": single}) == []


@pytest.mark.parametrize(
    "saved",
    [
        lambda: {"rng": raystow.Rng()},
        lambda: {"own": [raystow.PerRank({"x": raystow.Rng()})]},
        lambda: {"torch": torch.get_rng_state()},
        lambda: {"mine": raystow.PerRank(torch.get_rng_state())},
        lambda: {"rng_state": torch.get_rng_state().numpy()},
        lambda: {"random": (3, (1, 2, 624), None)},
        lambda: {"numpy_rng": np.random.get_state(legacy=False)["state"]["pos"]},
        lambda: {"trainer": dumps({"generators": {"torch": torch.get_rng_state()}})},
    ],
)
def test_saved_generators_are_found(saved: Callable[[], State]) -> None:
    assert about({"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), **saved()}) == []


def test_names_of_modules_and_loaders_are_no_generators() -> None:
    class Loader:
        def __iter__(self) -> Any:
            raise AssertionError

        def state_dict(self) -> State:
            return {"sampler": {"generator": b"1", "random": 3}}

        def load_state_dict(self, state: State) -> None:
            raise AssertionError

    gan = nn.ModuleDict({"generator": nn.Linear(2, 2), "drop": nn.Dropout(0.1)})
    optimizer = torch.optim.SGD(gan.parameters(), lr=0.1)
    assert len(about({"gan": gan, "optim": optimizer, "loader": Loader()})) == 1


# Data loaders and metrics


def test_a_loader_with_a_generator_is_noticed() -> None:
    for generator, expected in ((None, []), (torch.Generator(), ['state["loader"] was made with generator='])):
        loader = StatefulDataLoader([1, 2], shuffle=True, generator=generator)  # type: ignore[arg-type]
        for saved in (loader, raystow.PerRank(loader)):
            assert [notice.partition(",")[0] for notice in about({"loader": saved})] == expected


def test_metrics_that_are_not_persistent_are_noticed() -> None:
    metric = MeanMetric()
    state = {"model": nn.ModuleDict({"net": nn.Linear(2, 2), "loss": metric})}
    assert about(state) == []
    metric.update(3.0)
    (notice,) = about(state)
    assert notice.startswith('state["model"] has metrics that its state_dict() leaves out')
    metric.persistent(True)
    assert about(state) == []


def test_low_bit_optimizers_are_noticed() -> None:
    training = Training(torch.optim.SGD, momentum=0.9)
    training.optimizer.state[training.model[0].weight]["momentum_buffer"] = Quantized.random((4, 4))
    (notice,) = about(training.objects())
    assert notice.startswith('state["optim"] has tensors that consist of others')
    assert "set_state_dict" in notice


# Plain values


def test_values_that_do_not_change_are_noticed_once() -> None:
    training, saves = Training(), Saves()
    state = training.objects(step=0, where={"epoch": 1, "name": "a"})
    assert saves.save(state, step=10) == []
    (notice,) = saves.save(state, step=20)
    assert notice.startswith('no plain value has changed since the save of step 10: state["step"]; set it ')
    assert saves.save(state, step=30) == []


def test_values_are_compared_without_those_of_objects() -> None:
    training = Training()
    scheduler = lr_scheduler.StepLR(training.optimizer, 3)
    for schedule in (lambda: scheduler, scheduler.state_dict):
        saves = Saves()
        for step, expected in ((10, 0), (20, 1)):
            training.optimizer.step()
            scheduler.step()
            assert len(saves.save(training.objects(schedule=schedule(), step=7), step=step)) == expected


@pytest.mark.parametrize(
    "values",
    [
        lambda step: {"step": step},
        lambda step: {"seed": 3, "progress": raystow.PerRank({"position": step})},
        lambda step: {"seed": 3, "trainer": dumps({"step": step})},
        lambda step: {"name": "llama", "tuned": True, "best": None, "empty": {}},
        lambda step: {"config": {"layers": 12, "lr": 3e-4, "steps": 1000, "max_step": 5}, "epoch": 0},
        lambda step: {},
    ],
)
@pytest.mark.parametrize("form", ["objects", "dicts"])
def test_changed_values_and_no_numbers_are_right(values: Callable[[int], State], form: str) -> None:
    training, saves = Training(), Saves()
    for step in (10, 20, 30):
        assert saves.save(getattr(training, form)(**values(step)), step=step) == []


def test_one_step_that_is_saved_twice_is_right() -> None:
    saves = Saves()
    for step in (10, 10, 20):
        assert saves.save({"step": step}, step=step) == []


# The structure of a fresh start


def test_a_restart_that_would_fail_is_noticed() -> None:
    new, trained = Training(steps=0), Training()
    (notice,) = Saves(new.dicts(extra=1)).save(trained.dicts(step=1))
    assert notice.startswith("a restart fails, because its `into` differs from this state: in `into` but not saved: extra, ")
    assert "saved but not in `into`: optim.state.0.exp_avg, " in notice
    assert 'put raystow.AsSaved() in place of into["optim"]' in notice


def test_a_restart_that_would_leave_values_out_is_noticed() -> None:
    rules = NameRules.of(strict=False, allow_missing=(), allow_unused=())
    (notice,) = Saves({"w": torch.zeros(2)}, rules).save({"w": torch.zeros(2), "step": 1})
    assert notice.startswith(
        "a restart leaves this out, because its `into` differs from this state: saved but not in `into`: step;"
    )


@pytest.mark.parametrize(
    ("now", "then", "differ"),
    [
        (torch.zeros(0, 6), torch.zeros(3, 6), "float32 (0, 6), float32 (3, 6)"),
        (np.zeros(2), np.zeros(2, np.float32), "float64 (2,), float32 (2,)"),
    ],
)
def test_a_tensor_that_has_grown_is_noticed(now: Any, then: Any, differ: str) -> None:
    for rules in (STRICT, NameRules.of(strict=False, allow_missing=(), allow_unused=())):
        (notice,) = Saves({"w": now, "n": 0}, rules).save({"w": then, "n": 1})
        assert notice == (
            f'a restart fails, because its `into` differs from this state: into["w"] was {differ} is saved; '
            "make them match, or save what grows as an object with state_dict() and load_state_dict()"
        )
    assert Saves({"w": torch.zeros(0)}).save({"w": torch.zeros(0)}) == []


def test_names_that_may_be_left_out_are_not_noticed() -> None:
    rules = NameRules.of(strict=True, allow_missing="head*", allow_unused=["optim", "step"])
    saves = Saves({"w": torch.zeros(2), "head": torch.zeros(2)}, rules)
    assert saves.save({"w": torch.zeros(2), "optim": {"m": torch.zeros(2)}, "step": 1}) == []


def test_a_fresh_start_of_the_same_structure_is_right() -> None:
    new, trained = Training(steps=0), Training()
    own = {"list": [], "grown": {"a": 1}, "rng": raystow.Rng(), "mine": raystow.PerRank({"at": 0, "buffer": torch.zeros(2)})}
    grown = {**own, "list": [1, 2], "grown": {"a": 1, "b": [2]}}
    assert Saves(new.objects(**own, step=0)).save(trained.objects(**grown, step=1)) == []
    assert Saves(new.objects(step=0)).save(trained.dicts(step=1)) == []
    marked = {"model": new.model.state_dict(), "optim": raystow.AsSaved(), "step": 0}
    assert Saves(marked).save(trained.dicts(step=1)) == []
    weights, moments = get_state_dict(new.model, new.optimizer)
    into = {"model": weights, "optim": moments, "step": 0}
    new.optimizer.state.clear()
    weights, moments = get_state_dict(trained.model, trained.optimizer)
    assert Saves(into).save({"model": weights, "optim": moments, "step": 1}) == []


# All of them


def test_each_notice_comes_once_from_rank_0() -> None:
    new = Training(steps=0)
    new.model.append(nn.Dropout(0.1))
    lr_scheduler.StepLR(new.optimizer, 3)
    saves, other = Saves({"model": new.model}), Saves({"model": new.model}, rank=1)
    assert len(saves.save(new.objects(step=0), step=1)) == 4
    assert len(saves.save(new.objects(step=0), step=2)) == 1
    assert saves.save(new.objects(step=0), step=3) == []
    assert [other.save(new.objects(step=0), step=step) for step in (1, 2, 3)] == [[], [], []]


def test_a_state_that_cannot_be_examined_is_saved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    model[1].p = "a tenth"  # cannot be compared with a number
    saves = Saves()
    assert [saves.save({"model": model, "step": 0}, step=step) for step in (1, 2)] == [[], []]
