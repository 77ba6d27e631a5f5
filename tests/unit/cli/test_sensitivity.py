"""The effect of rounding on the loss of a small trained model, and the rules that are proposed from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raystow
from raystow.demo.model import GPT, batch, loss_of
from raystow.orchestrator.sensitivity import Proposal, Sensitivity, Trial
from raystow.state.lossy.profiles import Lossy
from raystow.state.lossy.rules import MantissaBits
from raystow.state.lossy.tensor_roles import role
from raystow.state.tree import flatten
from raystow.storage.errors import StateError

LEVELS = {"weights": [MantissaBits(16), MantissaBits(1)], "exp_avg": [MantissaBits(5)], "exp_avg_sq": [MantissaBits(5)]}
Setup = tuple[dict[str, Any], Callable[[], float], Callable[[], float]]


@pytest.fixture(scope="module")
def trained() -> Setup:
    """Return a trained state, its loss function, and a function that trains some more steps."""
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog. " * 200), dtype=torch.uint8)
    model = GPT(width=32, layers=1, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(steps: int = 3, start: int = 1000) -> float:
        for step in range(start, start + steps):
            lost = loss_of(model, batch(data, step=step, rank=0, size=4))
            optimizer.zero_grad()
            lost.backward()
            optimizer.step()
        return lost.item()

    def loss() -> float:
        with torch.no_grad():
            return float(loss_of(model, batch(data, step=5000, rank=0, size=8)))

    train(40, 0)
    return {"model": model.state_dict(), "optim": optimizer.state_dict()["state"]}, loss, train


def flat(state: Any) -> dict[str, torch.Tensor]:
    return {leaf.name: leaf.value for leaf in flatten(state)}


def test_each_group_is_tried_and_the_state_is_restored(trained: Setup) -> None:
    state, loss, train = trained
    before, random = {name: tensor.clone() for name, tensor in flat(state).items()}, torch.get_rng_state()
    found = raystow.sensitivity(state, loss=loss, train=train, levels=LEVELS)
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in flat(state).items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8)), name
    assert found.loss == loss()
    assert found.noise == 0
    changes = {(trial.group, str(trial.rule)): trial.change for trial in found.trials}
    roles = [f"{role}.weights" for role in ("attention", "embeddings", "feed-forward")]
    assert [*dict.fromkeys(trial.group for trial in found.trials)] == ["exp_avg", "exp_avg_sq", *roles]
    assert all(changes[group, "None"] == 0 for group in ("exp_avg", *roles))
    for group in roles:
        assert abs(changes[group, "MantissaBits(16)"]) < 1e-3 < abs(changes[group, "MantissaBits(1)"])
    assert changes["exp_avg", "MantissaBits(5)"] != 0
    assert all(0 < trial.stored < trial.raw for trial in found.trials if trial.rule is not None)


def test_a_proposal_is_valid_for_a_checkpointer(trained: Setup) -> None:
    state, loss, train = trained
    found = raystow.sensitivity(state, loss=loss, train=train, levels=LEVELS)
    nothing, some, most = (found.propose(budget) for budget in (0, 2e-2, 1e9))
    assert nothing.change == 0, "changes below the resolution of the loss cost nothing"
    assert nothing.stored > some.stored > most.stored
    assert some.change <= 2e-2
    assert set(most.rules) == {trial.group for trial in found.trials}
    assert most.rules["attention.weights"] == MantissaBits(1)
    assert not Lossy.of(most.rules).unmatched(flat(state))


def test_without_training_steps_only_weights_are_tried(trained: Setup) -> None:
    state, loss, _ = trained
    found = raystow.sensitivity(state, loss=loss, levels=LEVELS)
    assert found.trained is None
    assert {trial.group.partition(".")[2] for trial in found.trials} == {"weights"}
    with pytest.raises(StateError, match="no tensor"):
        raystow.sensitivity({"step": 3, "ids": torch.arange(5000)}, loss=loss)


@pytest.mark.parametrize(
    ("levels", "named"),
    [
        ([MantissaBits(7)], "levels is"),
        ({"attention": [MantissaBits(7)]}, "attention"),
        ({"exp_avg": MantissaBits(7)}, "exp_avg"),
        ({"exp_avg": [7]}, "7 is not a rule"),
        ({"exp_avg_sq": [raystow.Blockwise(8, 64)]}, "second moments"),
    ],
)
def test_invalid_levels_are_refused_before_any_rounding(levels: Any, named: str) -> None:
    def loss() -> float:
        raise AssertionError("it was called")

    with pytest.raises(StateError, match=named):
        raystow.sensitivity({"weights": torch.randn(100, 100)}, loss=loss, levels=levels)


def test_weights_derived_from_a_master_copy_are_not_tried() -> None:
    master = torch.randn(40, 40)
    state = {"model": {"attn": master.bfloat16()}, "optim": {"master": {"attn": master}}}
    found = raystow.sensitivity(state, loss=lambda: 0.0, train=lambda: float(master.sum()))
    assert {trial.group for trial in found.trials} == {"attention.master"}


def test_an_error_of_the_loss_restores_the_tensors() -> None:
    weights, calls = torch.randn(2000), [0.0]
    before = weights.clone()

    def loss() -> float:
        if not torch.equal(weights, before):
            raise ValueError("enough")
        return calls[0]

    with pytest.raises(ValueError, match="enough"):
        raystow.sensitivity({"w": weights}, loss=loss)
    assert torch.equal(weights, before)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), max_size=4), max_size=4),
    st.integers(0, 30),
    st.sampled_from([0.0, 3.0]),
)
def test_the_proposal_is_the_smallest_within_the_budget(options: list[list[tuple[int, int]]], budget: int, noise: float) -> None:
    trials = [Trial(str(i), None, 0.0, 100, 100) for i in range(len(options))]
    for i, some in enumerate(options):
        trials += [Trial(str(i), MantissaBits(1 + k), float(change), 100, stored) for k, (change, stored) in enumerate(some)]
    found = Sensitivity(0.0, None, noise, tuple(trials)).propose(budget)
    best = [(0.0, 0)]
    for some in options:
        costs = [(0.0, 100), *((max(float(change), noise), stored) for change, stored in some)]
        best = [(a + c, b + d) for a, b in best for c, d in costs if a + c <= budget]
    assert found.stored == min(stored for _, stored in best)
    assert found.change <= budget
    assert found.raw == 100 * len(options)
    assert Sensitivity(0.0, None, 0.0, ()).propose(1) == Proposal()


def test_role_is_derived_from_the_tensor_name() -> None:
    names = {
        "model.layers.3.self_attn.q_proj.weight": "attention",
        "model.layers.3.mlp.gate_proj.weight": "feed-forward",
        "model.embed_tokens.weight": "embeddings",
        "model.layers.3.input_layernorm.weight": "norms",
        "transformer.h.0.attn.c_attn.weight": "attention",
        "transformer.wte.weight": "embeddings",
        "transformer.ln_f.weight": "norms",
        "blocks.0.down.weight": "feed-forward",
        "conv1.weight": "other",
    }
    assert {name: role(name) for name in names} == names
