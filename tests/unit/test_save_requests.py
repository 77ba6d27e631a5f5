"""Saves that callbacks of trainers make at once: all ranks decide alike, and look about once a second."""

from __future__ import annotations

import pytest
import torch
from fake_clock import FakeClock

from raystow.orchestrator.integrations.save_requests import SaveRequests
from raystow.storage.errors import Unsupported

CPU = torch.device("cpu")


class Ranks:
    """Two ranks that take the same steps. ``looks``: at which they exchanged numbers."""

    def __init__(self, *seconds: float, preempted: int = -1) -> None:
        self.clocks = [FakeClock() for _ in seconds]
        self.step, self.looks = 0, list[int]()
        notice = (lambda: self.step == preempted) if preempted >= 0 else None
        self.requests = [SaveRequests(notice, clock, gather=self._gather) for clock in self.clocks]
        self._seconds, self._sent, self._complete = seconds, list[torch.Tensor](), False

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        if self._complete:
            return torch.cat(self._sent)
        self._sent.append(own)
        return own

    def next(self) -> bool:
        """Take a step; return what all ranks decide."""
        self.step += 1
        for clock, seconds in zip(self.clocks, self._seconds, strict=True):
            clock.sleep(seconds)
        self._sent, self._complete = [], False
        for request in self.requests:  # what each sends, without a decision
            state = dict(vars(request))
            request.due(self.step, CPU)
            vars(request).update(state)
        if self._sent:
            assert len(self._sent) == len(self.requests), "all ranks look at the same step"
            self.looks.append(self.step)
        self._complete = True
        decided = {request.due(self.step, CPU) for request in self.requests}
        assert len(decided) == 1
        return decided.pop()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_of_one_rank_is_a_save_of_all(rank: int) -> None:
    ranks = Ranks(0.1, 0.2)
    assert not any(ranks.next() for _ in range(20))
    ranks.requests[rank].ask()
    saves = [ranks.next() for _ in range(20)]
    assert saves.count(True) == 1
    assert saves.index(True) < 10, "about a second later"


def test_a_notice_is_seen_within_a_second_of_steps() -> None:
    ranks = Ranks(1.5, 1.5, preempted=7)
    assert [ranks.next() for _ in range(10)] == [step == 7 for step in range(1, 11)]
    assert ranks.looks == list(range(1, 11))


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 100), (0.1, 10), (0.4, 2), (30.0, 1)])
def test_short_steps_are_not_all_looked_at(seconds: float, most: int) -> None:
    ranks = Ranks(seconds, seconds)
    for _ in range(300):
        ranks.next()
    gaps = [later - earlier for earlier, later in zip(ranks.looks[2:], ranks.looks[3:], strict=False)]
    assert set(gaps) <= {most, most - 1}


def test_the_last_step_is_looked_at() -> None:
    requests = SaveRequests(None, FakeClock())
    assert not any(requests.due(step, CPU) for step in (1, 2))
    requests.ask()
    assert not requests.due(3, CPU)
    assert requests.due(3, CPU, last=True)
    assert not requests.due(3, CPU, last=True)


def test_a_training_goes_on_if_notices_cannot_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    def preempted() -> bool:
        raise Unsupported("Ray Train is too old", remedy="upgrade Ray")

    requests = SaveRequests(preempted)
    assert not any(requests.due(step, CPU, last=True) for step in range(1, 4))
    requests.ask()
    assert requests.due(4, CPU, last=True)
    assert caplog.text.count("Ray Train is too old") == 1
