"""What a run has named: what the journal records of it, and what is refused."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.state_equality import same
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import raystow
from raystow.integrations.run.members import Members, check
from raystow.state import value_text
from raystow.storage.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


class Counter:
    """An object of a user."""

    def __init__(self) -> None:
        self.count, self.loads = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self.loads = state["count"], self.loads + 1


def everything() -> tuple[dict[str, Any], dict[str, Any]]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shared = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": {"loss": 1.0, "steps": [1, 2]}}
    own = {"counter": Counter(), "rng": raystow.Rng(), "deep": [{"tensor": torch.zeros(3)}, np.zeros(2), ("a", Counter())]}
    return shared, own


def test_all_but_models_and_optimizers_comes_back_in_place() -> None:
    shared, own = everything()
    members = Members(shared, own)
    own["deep"][0]["tensor"].fill_(7)
    own["counter"].count = 5
    shared["scheduler"].last_epoch = 3
    before = copy.copy(shared["best"])
    recorded, drawn = value_text.loads(value_text.dumps(members.values())), torch.rand(1)

    tensor, array, counter = own["deep"][0]["tensor"], own["deep"][1], own["counter"]
    tensor.fill_(8), array.fill(9), shared["best"].update(loss=2.0, more=3), shared["best"]["steps"].append(3)
    counter.count, shared["scheduler"].last_epoch = 6, 4
    weight = shared["model"].weight.detach().clone()
    members.load(recorded)
    assert torch.equal(torch.rand(1), drawn), "the generators were set back"
    assert (counter.count, counter.loads, shared["scheduler"].last_epoch) == (5, 1, 3)
    assert own["deep"][0]["tensor"] is tensor
    assert own["deep"][1] is array
    assert (tensor.tolist(), array.tolist()) == ([7.0] * 3, [0.0] * 2)
    assert shared["best"] == {**before, "steps": [1, 2]}
    assert torch.equal(shared["model"].weight, weight)


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    left: object
    right: object


def changed(structure: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a state had when the process began, and what it had become when it was recorded."""
    before: dict[str, Any] = {
        "grown": {"buffer": torch.zeros(1), "array": np.zeros(1)},
        "cast": {"buffer": torch.zeros(2), "array": np.zeros(2)},
        "none": {"last": {"loss": 1.0}, "list": [1], "tuple": (1,), "best": None},
        "tuples": {"pair": (1, 2), "named": Pair(1, [2]), "new": None},
        "kinds": {"window": None, "value": 1},
    }
    after: dict[str, Any] = {
        "grown": {"buffer": torch.arange(4.0), "array": np.arange(4.0), "more": torch.ones(2)},
        "cast": {"buffer": torch.full((2,), 1e-300, dtype=torch.float64), "array": np.full(2, 1 << 40)},
        "none": {"last": None, "list": {"a": 1}, "tuple": 3, "best": {"loss": torch.ones(2)}},
        "tuples": {"pair": (1, 2, 3), "named": Pair(3, [4, torch.ones(1)]), "new": (1, (2,))},
        "kinds": {"window": deque([1], 3), "value": {1, 2}},
    }
    return before[structure], after[structure]


@pytest.mark.parametrize("structure", ["grown", "cast", "none", "tuples", "kinds"])
@pytest.mark.parametrize("around", [lambda state: state, raystow.PerRank], ids=["", "per-rank"])
def test_values_of_another_structure_come_back(structure: str, around: Any) -> None:
    """As a restore of a version does: nothing is broadcast, cast, or left as it was."""
    state, recorded = changed(structure)
    text = value_text.dumps(Members({"own": {"state": around(recorded)}}, {}).values())
    Members({"own": {"state": around(state)}}, {}).load(value_text.loads(text))
    assert same(state, recorded), state


@pytest.mark.parametrize("now", [torch.zeros(4), torch.zeros(1, dtype=torch.float64), np.zeros(1)])
def test_another_tensor_of_this_name_is_refused(now: Any) -> None:
    recorded = Members({"buffer": torch.ones(1)}, {}).values()
    with pytest.raises(StateError, match="buffer: has another shape or dtype than was recorded"):
        Members({"buffer": now}, {}).load(value_text.loads(value_text.dumps(recorded)))


def test_generators_are_set_when_all_others_are_loaded() -> None:
    """A loaded data loader draws seeds, which those that were saved contain already."""

    def named() -> tuple[StatefulDataLoader[int], Members]:
        loader = StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return loader, Members({}, {"deep": [raystow.Rng()], "loader": loader})

    (loader, members), (other, again) = named(), named()
    batches = iter(loader)
    next(batches)
    recorded = value_text.loads(value_text.dumps(members.values()))
    expected = torch.rand(1), next(batches), torch.rand(1)
    again.load(recorded)
    batches = iter(other)
    assert all(map(torch.equal, (torch.rand(1), next(batches), torch.rand(1)), expected))


def test_models_and_optimizers_are_found_wherever_they_are() -> None:
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, two)]
    members = Members({"nets": {"a": one, "b": [two]}}, {"o": optimizers})
    assert members.optimizers == optimizers
    assert sorted(name for name, _ in members.model.named_parameters()) == [
        "nets/a.bias", "nets/a.weight", "nets/b/0.bias", "nets/b/0.weight",
    ]  # fmt: skip
    assert Members({"model": one}, {}).model is one


@pytest.mark.parametrize("value", [3, 2.5, "text", None, True, (1, 2), np.float32(1), b"bytes"])
def test_values_that_cannot_change_in_place_are_refused(value: object) -> None:
    with pytest.raises(StateError, match=r"^steps: a \w+ cannot change in place \(put it in a dict"):
        check("steps", value)


@pytest.mark.parametrize("value", [np.random.default_rng(), torch.Generator(), deque([1]), {1}, DataLoader([1])])
def test_other_values_need_a_state_dict(value: object) -> None:
    with pytest.raises(StateError, match=r"^loader: a \w+ cannot change in place \(give its class state_dict\(\)"):
        check("loader", value)


@pytest.mark.parametrize("value", [{}, [], torch.zeros(1), np.zeros(1), Counter(), torch.nn.Linear(1, 1), raystow.Rng()])
def test_objects_and_containers_are_taken(value: object) -> None:
    check("name", value)


def test_run_names_what_is_wrong_before_it_starts_anything() -> None:
    with pytest.raises(StateError, match="durable_every without a journal"):
        raystow.Run("/tmp/never", durable_every=4)
    with pytest.raises(StateError, match="every"):
        raystow.Run("/tmp/never", every=0)
    with pytest.raises(StateError, match="uri: no repository is named"):
        raystow.Run()
