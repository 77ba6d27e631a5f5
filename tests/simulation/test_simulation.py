"""Simulated worlds violate no invariant, a seed determines its history, and each planted bug is detected (slow suite)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raystow.storage.root import invariants
from raystow.storage.runtime.clock import SYSTEM

from .planted import BUGS, SEEDS, Bug, changed, find
from .run import Outcome, play

_ROOT = Path(__file__).parents[2]
_AT_ONCE = 25
_QUICK, _SOAK = 50, 3_000


@pytest.mark.parametrize("first", range(0, _QUICK, _AT_ONCE))
def test_worlds_violate_no_invariant(first: int) -> None:
    outcomes = [play(seed) for seed in range(first, first + _AT_ONCE)]
    assert not any(outcome.broken for outcome in outcomes), _reports(outcomes)
    assert sum(outcome.versions for outcome in outcomes) > 5 * _AT_ONCE  # enough happened in the worlds


def test_a_seed_replays_the_same_history() -> None:
    assert play(7) == play(7)
    assert play(7).digest != play(8).digest


def test_a_seed_replays_its_history_in_another_process() -> None:
    """Sets have another order there."""
    said = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "7"],
            cwd=_ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert play(7).digest in said[0]


def test_the_report_of_a_failed_seed_has_the_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "OF_SWAP", ())
    broken = next(outcome for seed in range(100) if (outcome := play(seed)).broken)
    assert broken.broken == "at most one coordinator's writes win"
    assert f"python -m tests.simulation {broken.seed}\n" in broken.report
    assert broken.report.count("\n") >= 40


def test_planted_bugs_match_the_code() -> None:
    for bug in BUGS:
        for source in changed(bug).values():
            compile(source, bug.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_detected(bug: Bug) -> None:
    finding = find(bug)
    assert finding.seed is not None, f"{SEEDS} seeds did not detect the bug: the simulation is too weak"
    assert not finding.broken.startswith("nothing crashes")


@pytest.mark.slow
def test_thousands_of_worlds_violate_no_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    begun, broken, played = SYSTEM.monotonic(), list[Outcome](), 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        for outcome in pool.imap_unordered(play, range(_SOAK), chunksize=20):
            played += 1
            broken += [outcome] if outcome.broken else []
            if played % 500 == 0:
                with capsys.disabled():
                    print(
                        f"\n{played} of {_SOAK} seeds, {len(broken)} broken, {SYSTEM.monotonic() - begun:.0f} s",
                        end="",
                        flush=True,
                    )
    assert not broken, _reports(broken)


def _reports(outcomes: list[Outcome]) -> str:
    """Return the whole first report and the list of other failed seeds."""
    failed = sorted((outcome for outcome in outcomes if outcome.broken), key=lambda outcome: outcome.seed)
    return "\n".join([outcome.report for outcome in failed[:1]] + [f"also seed {o.seed}: {o.broken}" for o in failed[1:20]])
