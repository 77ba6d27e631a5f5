"""The recommended save interval minimizes the lost time within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystow.orchestrator.save_interval import best_interval, lost_share

MTBF = st.floats(60, 1e7)
SHARE = st.floats(1e-6, 0.4)  # cost of a save as a fraction of the mean time between failures


@given(MTBF, SHARE, st.floats(0.01, 100))
def test_the_best_interval_loses_the_least_time(mtbf: float, share: float, factor: float) -> None:
    cost = share * mtbf
    best = best_interval(cost, mtbf)
    assert lost_share(best, cost, mtbf) <= lost_share(best * factor, cost, mtbf) * (1 + 1e-9)


@given(MTBF, SHARE, st.floats(1e-4, 1))
def test_a_budget_only_lengthens_the_interval(mtbf: float, share: float, budget: float) -> None:
    cost = share * mtbf
    free, bounded = best_interval(cost, mtbf), best_interval(cost, mtbf, budget)
    assert cost / bounded <= budget * (1 + 1e-9)
    assert bounded == free or (bounded > free and bounded == pytest.approx(cost / budget))


@given(MTBF, st.floats(0, 1e9))
def test_the_interval_is_at_most_the_time_between_failures(mtbf: float, cost: float) -> None:
    assert 0 <= best_interval(cost, mtbf) <= mtbf


def test_the_best_interval_matches_the_formula_of_young() -> None:
    assert best_interval(50, 40_000) == 2000
    assert lost_share(2000, 50, 40_000) == pytest.approx(0.05)
