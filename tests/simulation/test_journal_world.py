"""Simulated failures of trainings with a journal: a failure costs at most one step while one of two copies survives, and no
replay mixes histories. The checks detect planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raystow.orchestrator.journal import entry_plan
from raystow.workers.journal.entry_replicator import EntryReplicator
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.protocol.messages import START, EntryInfo, EntryKept

from .journal import Violation
from .journal_world import JournalWorld

EVENTS = 300
QUICK, SOAK = 40, 5_000


def violation(seed: int) -> str:
    """Return the violated invariant, or an empty string. Without digests, only the plan can separate histories."""
    try:
        JournalWorld(seed, digests=False).play(EVENTS)
    except Violation as found:
        return found.invariant
    return ""


def check(seeds: range) -> None:
    replayed = deaths = 0
    for seed in seeds:
        world = JournalWorld(seed)
        try:
            world.play(EVENTS)
        except Violation as found:
            raise AssertionError(f"seed {seed}: {found}") from found
        replayed, deaths = replayed + world.replayed, deaths + world.deaths
    assert deaths > len(seeds)
    assert replayed > 10 * len(seeds)


def test_journal_worlds_violate_no_invariant() -> None:
    check(range(QUICK))


@pytest.mark.slow
def test_thousands_of_journal_worlds_violate_no_invariant() -> None:
    check(range(SOAK))


def _oldest_here(self: EntryStore, info: EntryInfo) -> int:
    """Treat entries that are not on this node as not needed, so a restarted node drops the last copies."""
    mine = [
        other.step for other in self.holdings(info.repository) if (other.rank, other.world_size) == (info.rank, info.world_size)
    ]
    return min(mine, default=START)


def _done_at_once(self: EntryReplicator, info: EntryInfo, done: Callable[[EntryKept], None]) -> None:
    done(EntryKept(info.step, 0))
    self.wake()


BUGS = {
    "restarted nodes drop copies": (EntryStore, "oldest", _oldest_here, "a failure costs one step at most"),
    "copies are not waited for": (EntryReplicator, "submit", _done_at_once, "a failure costs one step at most"),
    "generations are not distinguished": (
        *(entry_plan, "generation_of", lambda lineage, step: lineage[-1]),
        "lines of history are not mixed",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_journal_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, invariant = BUGS[bug]
    replace: Any = monkeypatch.setattr
    replace(where, name, wrong)
    assert invariant in (violation(seed) for seed in range(400))


def test_planning_separates_histories_without_digests() -> None:
    assert {violation(seed) for seed in range(QUICK)} == {""}
