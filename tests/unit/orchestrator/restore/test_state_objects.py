"""Objects in a state: modules, optimizers, schedulers and others are saved by what they return, and restored bit for bit."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.state_equality import same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel
from torchmetrics.classification import BinaryAUROC

import raystow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def saved(folder: Path, *states: Any) -> raystow.Version:
    """The version that these ranks save together."""
    with LocalCluster(str(folder)) as cluster:
        return cluster.save_all(list(states), step=5)


def model(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One training step on data of this seed."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure))


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in net.state_dict().values()]


def equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    name: functools.partial(getattr(torch.optim, name), lr=0.01)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "ASGD",
        "LBFGS",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    )
}
OPTIMIZERS |= {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "lr tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "groups": lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(parameters)]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    net = model(0)
    optimizer = OPTIMIZERS[name](net.parameters())
    for i in range(3):
        step(net, optimizer, i)
    version = saved(tmp_path, {"model": net, "optim": optimizer})
    losses = [step(net, optimizer, i) for i in range(3, 6)]
    for stepped in range(2):
        again = model(1)
        new = OPTIMIZERS[name](again.parameters())
        for i in range(stepped):
            step(again, new, i)
        places = [value.data_ptr() for value in again.state_dict().values()]
        raystow.restore(version, {"model": again, "optim": new})
        assert places == [value.data_ptr() for value in again.state_dict().values()]
        assert [step(again, new, i) for i in range(3, 6)] == losses
        assert equal(weights(again), weights(net))


def test_names_are_those_of_torch_in_both_directions(tmp_path: Path) -> None:
    net = model(0)
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 0)
    by_torch = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))
    version, other = saved(tmp_path / "objects", {"model": net, "optim": optimizer}), saved(tmp_path / "torch", by_torch)
    assert version.tensors().keys() == other.tensors().keys()
    assert version.values() == other.values()
    for source in (version, other):
        again = model(1)
        new = torch.optim.AdamW(again.parameters())
        raystow.restore(source, {"model": again, "optim": new})
        assert equal(weights(again), weights(net))
        assert step(again, new, 1) == step(*clone(net, optimizer), 1)
    into = dict(zip(("model", "optim"), get_state_dict(again, new), strict=True))
    raystow.restore(version, into)
    assert equal(weights(again), weights(net))


def clone(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    other = model(0)
    other.load_state_dict(net.state_dict())
    copied = torch.optim.AdamW(other.parameters())
    copied.load_state_dict(optimizer.state_dict())
    return other, copied


def test_a_fresh_optimizer_is_saved_and_restored_without_state(tmp_path: Path) -> None:
    net = model(0)
    optimizer = torch.optim.Adam(net.parameters())
    version = saved(tmp_path, {"model": net, "optim": optimizer})
    assert not optimizer.state
    again = model(1)
    new = torch.optim.Adam(again.parameters())
    raystow.restore(version, {"model": again, "optim": new})
    assert not new.state
    before = weights(again)
    assert raystow.restore_latest(str(tmp_path), {"model": again, "optim": new}) is not None
    assert not new.state
    assert equal(weights(again), before)


def test_state_of_another_dtype_than_its_parameter_is_kept(tmp_path: Path) -> None:
    def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
        net = nn.Linear(4, 4).bfloat16()
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    net, optimizer = made()
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    version = saved(tmp_path, {"model": net, "optim": optimizer})
    again, new = made()
    raystow.restore(version, {"model": again, "optim": new})
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        found = new.state[other]["momentum_buffer"]
        assert found.dtype == torch.float32
        assert torch.equal(found, optimizer.state[one]["momentum_buffer"])


class Wrapped(nn.Module):
    """A module whose parts are wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(nn.Linear(4, 4), backend="eager")
        self.second = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"))


def test_wrapped_modules_have_plain_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = torch.compile(nn.Sequential(Wrapped(), checkpoint_wrapper(nn.Linear(4, 4))), backend="eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    wrapped._orig_mod[0].first(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    version = saved(tmp_path, {"model": wrapped, "optim": optimizer})
    names = [f"{n}.{part}" for n in ("0.first", "0.second.0.0", "1") for part in ("bias", "weight")]
    assert sorted(name for name in version.tensors() if name.startswith("model.")) == [f"model.{name}" for name in names]
    assert [name for name in version.tensors() if name.startswith("optim.")] == [
        f"optim.state.0.first.{part}.momentum_buffer" for part in ("bias", "weight")
    ]
    again = nn.Sequential(Wrapped(), nn.Linear(4, 4))
    raystow.restore(version, {"model": again}, allow_unused="optim")
    assert equal(weights(again), weights(wrapped))


class Warmup:
    """A schedule with a state of its own."""

    def __init__(self) -> None:
        self.calls = {0: 0}

    def __call__(self, epoch: int) -> float:
        self.calls[0] += 1
        return 1 / (1 + self.calls[0])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [Warmup()]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Warmup(), cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 12),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [schedulers.MultiStepLR(o, [1]), schedulers.ConstantLR(o)], [2]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.MultiStepLR(o, [2, 4]), schedulers.StepLR(o, 3)]),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_same_rates(tmp_path: Path, name: str, rate: Any) -> None:
    """Those of SequentialLR share the memory of rates that are tensors."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = model(seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=copy.copy(rate))
        return net, optimizer, SCHEDULERS[name](optimizer)

    def run(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: Iterable[int]) -> list[float]:
        rates = []
        for i in steps:
            loss = step(net, optimizer, i)
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    parts, again = made(0), made(1)
    run(*parts, range(3))
    keys = ("model", "optim", "sched")
    version = saved(tmp_path, dict(zip(keys, parts, strict=True)))
    raystow.restore(version, dict(zip(keys, again, strict=True)))
    assert run(*again, range(3, 7)) == run(*parts, range(3, 7))
    assert equal(weights(again[0]), weights(parts[0]))
    assert type(again[2].state_dict()) is type(parts[2].state_dict())
    if name == "MultiStepLR":
        assert type(again[2].milestones) is Counter


class Own:
    """A user's own class."""

    def __init__(self, state: Any) -> None:
        self.state, self.loaded = state, list[Any]()

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_other_objects_get_what_they_returned(tmp_path: Path) -> None:
    states: list[Any] = [
        {"at": 3, "seen": [torch.arange(4), torch.arange(2)], "more": (1, b"x", None)},
        {},
        {"deep": {"empty": [], 7: {"rate": 0.5}}},
    ]
    version = saved(tmp_path, {"objects": [Own(state) for state in states], "n": 1})
    fresh: list[Any] = [{"at": 0, "seen": []}, {}, {"deep": {}}]
    objects = [Own(state) for state in fresh]
    into = {"objects": objects, "n": 0}
    raystow.restore(version, into)
    assert into["n"] == 1
    assert into["objects"] is objects
    for one, state in zip(objects, states, strict=True):
        assert same(one.loaded, [state])


class Items(list[int]):
    """A list that has more than its items."""

    def __init__(self, items: Iterable[int] = (), total: int = 0) -> None:
        super().__init__(items)
        self.total = total

    def state_dict(self) -> Any:
        return {"items": [*self], "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self[:], self.total = state["items"], state["total"]


def test_containers_that_are_objects_are_taken_as_objects(tmp_path: Path) -> None:
    version = saved(tmp_path, {"items": Items([4, 5], total=9), "in": [raystow.PerRank(Items([6], total=7))]})
    items, within = Items(), Items([1])
    raystow.restore(version, {"items": items, "in": [raystow.PerRank(within)]})
    assert [(items, items.total), (within, within.total)] == [([4, 5], 9), ([6], 7)]


def test_tensors_of_objects_are_filled_in_place(tmp_path: Path) -> None:
    version = saved(tmp_path, {"buffer": Own({"x": torch.arange(8.0), "n": 3})})
    there = torch.zeros(8)
    own = Own({"x": there, "n": 0})
    raystow.restore(version, {"buffer": own})
    assert own.loaded[0]["x"] is there
    assert torch.equal(there, torch.arange(8.0))


def test_a_restore_that_raises_loads_no_object(tmp_path: Path) -> None:
    version = saved(tmp_path, {"a": Own({"n": 1}), "model": model(0)})
    calls = Own({"n": 0})
    with pytest.raises(raystow.StateError, match="model"):
        raystow.restore(version, {"a": calls, "model": model(1, width=8)})
    with pytest.raises(raystow.StateError, match=r"saved but not in `into`: a\.n"):
        raystow.restore(version, {"b": calls, "model": model(1)})
    for path in tmp_path.rglob("*.pack"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(raystow.Damaged):
        raystow.restore(version, {"a": calls, "model": model(1)})
    assert calls.loaded == []


def test_an_object_that_fails_to_load_names_what_is_loaded(tmp_path: Path) -> None:
    """What was loaded before cannot be undone."""

    class Failing(Own):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("epoch")

    version = saved(tmp_path, {"failing": Own({"n": 1}), "last": Own({"n": 2}), "model": model(0), "rng": raystow.Rng()})
    last, net = Own({"n": 0}), model(1)
    with pytest.raises(raystow.StateError) as error:
        raystow.restore(version, {"failing": Failing({"n": 0}), "last": last, "model": net, "rng": raystow.Rng()})
    assert str(error.value) == (
        'into["failing"]: could not be loaded: KeyError: \'epoch\'; loaded: into["model"]; '
        'not loaded: into["last"], into["rng"] (end this process: its state is of two times)'
    )
    assert isinstance(error.value.__cause__, KeyError)
    assert last.loaded == []
    assert equal(weights(net), weights(model(0)))


def test_refused_types_are_named_with_their_path(tmp_path: Path) -> None:
    bad = Own({"lr_lambdas": [lambda epoch: 1.0]})
    with pytest.raises(raystow.StateError) as error:
        saved(tmp_path, {"sched": bad})
    assert 'state["sched"].state_dict()["lr_lambdas"][0]' in str(error.value)
    assert "state_dict()" in error.value.remedy
    with pytest.raises(raystow.StateError, match=r'state\["deep"\]\[0\]\.state_dict\(\): set'):
        saved(tmp_path, {"deep": [Own({1, 2})]})
    for whole in (Own({"n": 1}), Items(), model(), raystow.PerRank({"n": 1})):
        with pytest.raises(raystow.StateError, match=r"state: .* is not a dict"):
            saved(tmp_path, whole)
    with pytest.raises(raystow.StateError, match=r'state\["outer"\]\.state_dict\(\)\["inner"\]: .*its own state_dict\(\)'):
        saved(tmp_path, {"outer": Own({"inner": Own({})})})
    for name, unnamed in {"key": {(0, 1): 2}, "loop": (around := list[Any]())}.items():
        around.append(around)
        with pytest.raises(raystow.StateError, match=rf'state\["{name}"\]\.state_dict\(\)') as error:
            saved(tmp_path, {name: Own(unnamed)})
        assert error.value.remedy


def test_an_optimizer_without_its_module_is_refused(tmp_path: Path) -> None:
    net, other = model(0), model(1)
    with pytest.raises(raystow.StateError, match=r'state\["optim"\]: parameter 0 of 6, of shape \(4, 4\), is in no module'):
        saved(tmp_path, {"model": other, "optim": torch.optim.SGD(net.parameters())})
    with pytest.raises(raystow.StateError, match="is the object state"):
        saved(tmp_path, {"a": net, "b": [net]})
    with pytest.raises(raystow.StateError, match="add it, or its module, to the state"):
        saved(tmp_path, {"optim": torch.optim.SGD([torch.zeros(2, requires_grad=True)])})


def test_an_optimizer_may_have_tensors_of_the_state(tmp_path: Path) -> None:
    """Such as a temperature, and prompts of a model."""

    def made(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        net, rate = model(seed), torch.full((), float(seed), requires_grad=True)
        prompts = [torch.full((4,), seed + float(i), requires_grad=True) for i in range(2)]
        alone, both = torch.optim.Adam([rate], lr=0.1), torch.optim.Adam([*net.parameters(), *prompts], lr=0.1)
        return {"net": net, "log": {"rate": rate}, "prompts": prompts}, {"alone": alone, "both": both}

    def train(state: dict[str, Any], optimizers: dict[str, Any], i: int) -> float:
        first, second = state["prompts"]
        loss = (state["net"](first + second * torch.ones(8, 4) * i) - state["log"]["rate"]).square().mean()
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        return loss.item()

    state, optimizers = made(1)
    train(state, optimizers, 0)
    version = saved(tmp_path, {**state, **optimizers})
    names = "alone.state.log.rate.exp_avg", "both.state.net.0.weight.exp_avg", "both.state.prompts.1.step"
    assert version.tensors().keys() >= {*names}
    again, new = made(2)
    raystow.restore(version, {**again, **new})
    assert [train(again, new, i) for i in range(1, 4)] == [train(state, optimizers, i) for i in range(1, 4)]


def test_several_models_and_optimizers_belong_together(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        actor, critic = model(seed), model(seed + 1)
        critic[3].weight = actor[3].weight  # shared
        joint = torch.optim.AdamW([*actor.parameters(), *(p for p in critic.parameters() if p is not actor[3].weight)])
        return {
            "nets": {"actor": actor, "critic": critic, "ema": AveragedModel(actor)},
            "optims": [joint, torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)],
        }

    def train(state: dict[str, Any], steps: Iterable[int]) -> list[float]:
        losses = []
        for i in steps:
            losses.append(step(nn.Sequential(state["nets"]["actor"], state["nets"]["critic"]), state["optims"][0], i))
            losses.append(step(state["nets"]["critic"], state["optims"][1], i))
            state["nets"]["ema"].update_parameters(state["nets"]["actor"])
        return losses

    state, again = made(0), made(2)
    train(state, range(3))
    version = saved(tmp_path, state)
    raystow.restore(version, again)
    assert train(again, range(3, 5)) == train(state, range(3, 5))
    for name, net in state["nets"].items():
        assert equal(weights(again["nets"][name]), weights(net))


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    net = model(0)
    version = saved(tmp_path, {"model": net, "optim": torch.optim.SGD(net.parameters(), lr=0.1)})
    parameters = list(net.parameters())
    cases: list[tuple[Sequence[Any], str]] = [
        ([{"params": parameters[:2]}, {"params": parameters[2:]}], "has 2 parameter groups, the version 1"),
        (parameters[:-1], r"params.*3\.bias"),
    ]
    for groups, message in cases:
        with pytest.raises(raystow.StateError, match=message):
            raystow.restore(version, {"model": net, "optim": torch.optim.SGD(groups, lr=0.1)})


def test_metrics_with_growing_lists_are_restored(tmp_path: Path) -> None:
    metric, again = BinaryAUROC(), BinaryAUROC()
    for one in (metric, again):
        one.persistent(True)
    for i in range(3):
        metric.update(torch.rand(4 + i), torch.arange(4 + i) % 2)
    version = saved(tmp_path, {"metric": metric})
    raystow.restore(version, {"metric": again})
    assert len(again.preds) == 3
    assert torch.equal(again.compute(), metric.compute())


def test_a_scaler_and_extra_state_are_restored(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    def made() -> dict[str, Any]:
        return {"model": Extra(2, 2), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}

    state, again = made(), made()
    state["model"].extra = {"amax": torch.arange(3), "n": 1}
    state["scaler"].load_state_dict({**state["scaler"].state_dict(), "scale": 2.0})
    raystow.restore(saved(tmp_path, state), again)
    assert again["scaler"].state_dict() == state["scaler"].state_dict()
    assert same(again["model"].extra, state["model"].extra)


def test_objects_that_may_be_missing_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    version = saved(tmp_path, {"model": model(0)})
    own = Own({"n": 0})
    with caplog.at_level(logging.WARNING):
        raystow.restore(version, {"model": model(1), "own": own}, allow_missing="own")
    assert own.loaded == []
    assert "own" in caplog.text
