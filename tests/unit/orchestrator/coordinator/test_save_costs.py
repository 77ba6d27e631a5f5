from __future__ import annotations

import math

import pytest
from helpers.processes import incarnation

from raystow.orchestrator.coordinator.save_costs import SaveCosts
from raystow.storage.format.version_record import FragmentInfo, RestoreInfo, VersionRecord
from raystow.workers.protocol.messages import AskNextSave

DAY = 86400.0


def ask(seconds: float | None = None, mtbf: float | None = None, budget: float | None = None) -> AskNextSave:
    return AskNextSave(0, incarnation("a"), 8, 0, seconds, mtbf, budget)


def record(created: float, stall: float, *restored: float) -> VersionRecord:
    fragment = FragmentInfo(0, 1, "", (0,), 0, 0, 0, stall)
    restores = tuple(RestoreInfo(1, 1, at, 1, 1.0) for at in restored)
    return VersionRecord("r", 1, "a", 1, 1, created, 8, fragments=(fragment,), restores=restores)


def test_a_fixed_interval_is_used_unchanged() -> None:
    assert SaveCosts(0.0).interval(ask(seconds=7.5), 8, 100.0) == 7.5


def test_the_first_saves_measure_the_stall() -> None:
    costs = SaveCosts(0.0)
    assert costs.interval(ask(), 8, 100.0) == 60
    costs.saved(5.0, 1.0, cold=True)
    assert costs.interval(ask(), 8, 100.0) == 60
    costs.saved(0.5, 1.0, cold=False)
    assert costs.interval(ask(mtbf=10_000), 8, 100.0) == pytest.approx(100)


def test_the_interval_uses_the_median_stall_without_overlap() -> None:
    costs = SaveCosts(0.0)
    for stall, durable in ((0.5, 2.0), (40.0, 300.0), (0.5, 300.0)):
        costs.saved(stall, durable, cold=False)
    assert costs.interval(ask(mtbf=40_000), 8, 0.0) == 300
    assert costs.interval(ask(mtbf=40_000, budget=0.001), 8, 0.0) == pytest.approx(500)


def test_failures_of_earlier_processes_are_counted() -> None:
    costs = SaveCosts(9000.0)
    costs.recall([record(1000.0, 0.5, 900.0), record(2000.0, 0.5, 1500.0), record(3000.0, 0.5, 1500.0, 2500.0)])
    # a record has the second restore as well
    costs.restored([RestoreInfo(3, 1, 8000.0, 8, 1.0), RestoreInfo(1, 1, 2500.0, 1, 1.0)])
    assert costs.interval(ask(), 8, 10_000.0) == 60  # 55 s would be best, but the time between failures is a guess
    assert costs.interval(ask(), 8, 100_000.0) == pytest.approx(math.sqrt(2 * 0.5 * 99_000 / 3))
    assert costs.interval(ask(mtbf=3000), 8, 10_000.0) == pytest.approx(math.sqrt(2 * 0.5 * 3000))


def test_one_restart_is_no_rate_of_failures() -> None:
    costs = SaveCosts(0.0)
    costs.saved(0.5, 1.0, cold=False)
    costs.restored([RestoreInfo(3, 1, 600.0, 8, 1.0)])
    assert costs.interval(ask(), 8, 900.0) == pytest.approx(math.sqrt(DAY / 6.5e-3))


def test_without_a_failure_a_published_rate_is_used() -> None:
    costs = SaveCosts(0.0)
    costs.saved(0.5, 1.0, cold=False)
    assert costs.interval(ask(), 8, DAY) == pytest.approx(math.sqrt(DAY / 6.5e-3))
    assert costs.interval(ask(), 16, DAY) == pytest.approx(math.sqrt(DAY / 6.5e-3 / 2))
    assert costs.interval(ask(), 8, 1000 * DAY) == pytest.approx(math.sqrt(1000 * DAY))
