"""What a caller sees of a save that is under way."""

from __future__ import annotations

from raystow.orchestrator.pending import Pending
from raystow.storage.clock import SYSTEM


def test_the_stall_counts_while_the_caller_waits_and_then_stands_still() -> None:
    pending = Pending(1)
    assert pending.stall == 0
    with pending._holding_up(SYSTEM.monotonic() - 5):
        assert pending.stall >= 5  # as whoever reports it meanwhile sees it
    first = pending.stall
    assert 5 <= first == pending.stall
    with pending._holding_up(SYSTEM.monotonic() - 7):
        assert pending.stall >= first + 7
    assert first + 7 <= pending.stall


def test_who_waits_for_the_staging_hurries_it_and_who_asks_does_not() -> None:
    pending = Pending(1)
    assert not pending.staged(0)
    assert not pending._urgent.is_set()
    assert not pending.staged(1e-3)
    assert pending._urgent.is_set()
