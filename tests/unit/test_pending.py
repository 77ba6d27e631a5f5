"""The state of a save in progress, as its caller sees it."""

from __future__ import annotations

from raystow.orchestrator.client.pending import Pending
from raystow.storage.clock import SYSTEM


def test_the_stall_grows_only_while_the_caller_waits() -> None:
    pending = Pending(1)
    assert pending.stall == 0
    with pending._blocking(SYSTEM.monotonic() - 5):
        assert pending.stall >= 5  # the value during the wait
    first = pending.stall
    assert 5 <= first == pending.stall
    with pending._blocking(SYSTEM.monotonic() - 7):
        assert pending.stall >= first + 7
    assert first + 7 <= pending.stall


def test_waiting_raises_the_priority_and_polling_does_not() -> None:
    pending = Pending(1)
    assert not pending.staged(0)
    assert not pending._urgent.is_set()
    assert not pending.staged(1e-3)
    assert pending._urgent.is_set()
