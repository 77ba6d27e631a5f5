"""The ``Sqnr`` rule: its guarantee for each tensor, and its choice for different distributions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.orchestrator.sensitivity import sensitivity
from raystow.state.lossy import rounded_chunk
from raystow.state.lossy.profiles import Lossy, suitable
from raystow.state.lossy.rules import Blockwise, MantissaBits, Rule
from raystow.state.lossy.sqnr import Settled, Sqnr
from raystow.state.lossy.tensor_values import Numbers, words_of
from raystow.state.planner import Planner, SavePlan, plan_save
from raystow.storage.coding.chunk import ChunkEncoder
from raystow.storage.coding.dtypes import dtype as format_of
from raystow.storage.coding.rounded import together
from raystow.storage.errors import StateError


def words(values: torch.Tensor) -> torch.Tensor:
    return values.view(words_of(values.element_size()))


def chosen(asked: Sqnr, values: torch.Tensor, first: int = 0, before: Rule | None = None) -> Rule | None:
    boxes = [((row, 0), (min(40, len(values) - row), values.shape[1])) for row in range(0, len(values), 40)]
    return asked.choose(lambda: Numbers("t", str(values.dtype)[6:], words(values), boxes, first), before)


def applied(rule: Rule | None, values: torch.Tensor, first: int = 0) -> torch.Tensor:
    if rule is None:
        return values
    made, findings = rounded_chunk.rounded(rule, words(values), str(values.dtype)[6:], first)
    rounded_chunk.check("t", rule, [findings])
    return made.view(values.dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(words(a), words(b))


def sqnr(before: torch.Tensor, after: torch.Tensor) -> float:
    good = before.isfinite()
    a, b = (x[good].double().numpy().astype(np.longdouble) for x in (before, after))
    noise = np.square(a - b).sum()
    return float(10 * np.log10(np.square(a).sum() / noise)) if noise else math.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of random spread and magnitude, with outliers, rows of zeros, and sometimes nonfinite numbers."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-46, 30)
    values *= np.exp(random.choice([0, 2]) * random.standard_normal(shape))
    values[random.random(shape) < random.choice([0, 0.01])] *= random.choice([10, 1e4])
    values[random.random(shape[0]) < random.choice([0, 0.3])] = 0
    values[random.random(shape) < random.choice([0, 0.002])] = random.choice([math.inf, -math.inf, math.nan])
    with np.errstate(over="ignore"):
        return torch.from_numpy(values).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    shape=st.tuples(st.integers(1, 90), st.integers(1, 300)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    db=st.sampled_from([12, 24.5, 40, 60]),
    blocks=st.sampled_from([(), (8, 64)]),
    cut=st.integers(0, 300),
)
def test_the_sqnr_is_reached_for_any_cut_of_a_tensor(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, db: float, blocks: tuple[int, ...], cut: int
) -> None:
    """A second rounding changes nothing."""
    asked, values = Sqnr(db, blocks), drawn(seed, shape, dtype)
    rule = chosen(asked, values)
    made = applied(rule, values)
    assert sqnr(values, made) >= db - 1e-6
    assert same(made[~values.isfinite()], values[~values.isfinite()])
    if not blocks:
        assert torch.equal(made == 0, values == 0)
    if rule is None:
        return
    other = drawn(seed + 1, shape, dtype)
    beside = made if (its := chosen(asked, other)) is None else applied(its, other)
    cut %= shape[1]
    parts = made[:, cut:].contiguous(), torch.cat([made, beside]), torch.cat([beside, made], 1), made
    for again, first in zip(parts, (cut, 0, 0, 0), strict=True):
        settled = chosen(asked, again, first, rule)
        assert isinstance(settled, Settled)
        assert same(applied(settled, again, first), again)


def coded(rule: Rule, values: torch.Tensor) -> int:
    raw = words(applied(rule, values)).numpy().view(np.uint8).reshape(-1)
    return int(ChunkEncoder(raw.size).encode(raw, format_of("float32"))[0].size)


def best(values: torch.Tensor, db: float, kinds: dict[str, Callable[[int], Rule]]) -> dict[str, int]:
    """Return the bytes for each kind of rule with the fewest bits that reach the SQNR."""
    rules = {
        name: next(r for r in map(kind, range(2, 24)) if sqnr(values, applied(r, values)) >= db) for name, kind in kinds.items()
    }
    return {name: coded(rule, values) for name, rule in rules.items()}


KINDS: dict[str, Callable[[int], Rule]] = {
    "mantissas": MantissaBits,
    "64": lambda bits: Blockwise(bits, 64),
    "256": lambda bits: Blockwise(bits, 256),
}
SHAPE = 200, 320
OF = {
    "normal": normal(*SHAPE),
    "rows": normal(*SHAPE) * torch.exp(3 * normal(SHAPE[0], 1, seed=1)),
    "wide": normal(*SHAPE) * torch.exp(1.5 * normal(*SHAPE, seed=1)),
    "spikes": normal(*SHAPE) * torch.where(normal(*SHAPE, seed=2) > 3, 300.0, 1.0),
    "narrow": normal(*SHAPE).sign() * (1 + normal(*SHAPE).abs().clamp(max=0.99)),
}


@pytest.mark.parametrize("kind", OF)
@pytest.mark.parametrize("db", [25, 41])
def test_no_other_rule_needs_much_less_space_at_equal_sqnr(kind: str, db: int) -> None:
    values = OF[kind]
    rule = chosen(Sqnr(db), values)
    assert rule is not None
    assert sqnr(values, applied(rule, values)) >= db
    assert coded(rule, values) <= 1.1 * min(best(values, db, KINDS).values())


def test_the_chosen_rule_depends_on_the_distribution() -> None:
    rules = {kind: chosen(Sqnr(41), values) for kind, values in OF.items()}
    assert isinstance(rules["spikes"], MantissaBits), rules
    assert isinstance(rules["wide"], Blockwise)
    assert isinstance(rules["narrow"], Blockwise)
    assert rules["narrow"].bits < rules["wide"].bits


def test_outliers_outside_the_sample_are_detected() -> None:
    """The sample has no numbers of the rows with outliers."""
    values = normal(1000, 256)
    usual = chosen(Sqnr(35), values)
    sampled = torch.isin(words(values)[:, :1].contiguous(), Numbers("t", "float32", words(values), []).sample())
    values[~sampled[:, 0] & (torch.arange(1000) % 9 == 0)] *= torch.where(normal(256, seed=5) > 2.5, 300.0, 1.0)
    rule = chosen(Sqnr(35), values)
    assert sqnr(values, applied(rule, values)) >= 35 > sqnr(values, applied(usual, values))


def test_tensors_without_a_suitable_rule_keep_every_bit() -> None:
    """An empty tensor has no rule either."""
    assert chosen(Sqnr(60), normal(100, 40).half()) is None
    assert chosen(Sqnr(40), normal(100, 40)[:0]) is None
    for empty in (torch.zeros(100, 40), torch.full((100, 40), math.nan)):
        assert chosen(Sqnr(40), empty) == Settled(0)
    assert chosen(Sqnr(40), normal(100, 40).bfloat16().float()) == Settled(7), (
        "the numbers may have been rounded to 7 bits before"
    )


def test_blocks_are_for_first_moments_only() -> None:
    """Rules for derived tensors need no statistics."""
    assert suitable(Sqnr(40), "optim.exp_avg.w") == Sqnr(40)
    for name in ("optim.exp_avg_sq.w", "master.w", "w", "optim.square_avg.w"):
        assert suitable(Sqnr(40), name) == Sqnr(40, ())
    assert suitable(MantissaBits(3), "w") == MantissaBits(3)
    assert not Sqnr(61).preserves_cast("float32", "bfloat16")
    assert Sqnr(61, ()).preserves_cast("float32", "bfloat16")
    assert not Sqnr(60, ()).preserves_cast("float32", "bfloat16")
    assert not Sqnr(61, ()).changes("bfloat16")
    assert not any(map(Sqnr(10).changes, ("int64", "uint8", "bool", "float8_e4m3fn", "complex64")))
    for wrong in (lambda: Sqnr(9), lambda: Sqnr(True), lambda: Sqnr(math.nan), lambda: Sqnr(40, (7,)), lambda: Sqnr(40, [64])):  # type: ignore[arg-type]
        with pytest.raises(StateError):
            wrong()


def planned(planner: Planner, state: Any, save: int, rank: int = 0) -> SavePlan:
    plan = plan_save(state, rank=rank, world_size=2, planner=planner, save=save)
    _ = plan.division
    return plan


def rules(plan: SavePlan) -> dict[str, Rule | None]:
    return {shard.leaf.name: shard.rule for shard in plan.division.shards}


def test_replicas_have_equal_rules_and_choices_persist() -> None:
    lossy = Lossy.of({"exp_avg": Sqnr(40), "exp_avg_sq": Sqnr(40), "master": Sqnr(61)})
    moments = normal(300, 300)
    state = {
        "w": (master := normal(300, 300, seed=1)).bfloat16(),
        "master": {"w": master},
        "exp_avg": {"w": moments, "t": normal(300, 300, seed=3).t(), "copy": moments.clone(), "array": normal(70, 70).numpy()},
        "exp_avg_sq": {"w": moments.square()},
    }
    planners = [Planner(lossy), Planner(lossy)]
    first, second = (planned(planner, state, 4, rank) for rank, planner in enumerate(planners))
    assert rules(first) == rules(second)
    assert rules(first)["exp_avg.copy"] == rules(first)["exp_avg.w"]
    assert {rules(first)[name] for name in ("exp_avg_sq.w", "master.w")} == {MantissaBits(6), MantissaBits(9)}
    parts = first.division.parts
    first.release()
    moments += 1e-3 * normal(300, 300, seed=4)
    again = planned(planners[0], state, 5)
    assert again.division.parts is parts
    again.release()
    moments.copy_(moments.bfloat16())
    later = planned(planners[0], state, 6)
    assert later.division.parts is not parts
    assert rules(later)["exp_avg.w"] == Settled(7) != rules(second)["exp_avg.w"]
    for piece in later.pieces:
        piece.copy(np.empty(piece.nbytes, np.uint8))
    reports = later.rounded()
    assert all(one.rule == str(rules(later)[name]) for name, one in reports.items())
    later.release()


def test_differently_rounded_parts_are_reported_together() -> None:
    values = normal(100, 64)
    words_of_it, found = words(values), []
    for rule in (MantissaBits(6), Blockwise(8, 64), MantissaBits(6)):
        found.append(rounded_chunk.check("t", rule, [rounded_chunk.rounded(rule, words_of_it, "float32")[1]]))
    assert together(found).rule == "Blockwise(8, 64) and MantissaBits(6)"


def test_sensitivity_accepts_sqnr_as_a_level() -> None:
    state = {"exp_avg": {"w": normal(64, 64)}, "exp_avg_sq": {"w": normal(64, 64).square()}}
    before = state["exp_avg_sq"]["w"].clone()
    seen = list[float]()

    def train() -> float:
        seen.append(sqnr(before, state["exp_avg_sq"]["w"]))
        assert (state["exp_avg_sq"]["w"] > 0).all()
        return 1.0

    found = sensitivity(state, loss=lambda: 1.0, train=train, levels={"exp_avg": [Sqnr(30)], "exp_avg_sq": [Sqnr(30)]})
    assert {str(trial.rule) for trial in found.trials} == {"None", "Sqnr(30)"}
    assert 30 <= min(seen) < 40
    assert torch.equal(state["exp_avg_sq"]["w"], before)
