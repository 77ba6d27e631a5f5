"""Ranks of a trainer that decide together, in a real process group."""

from __future__ import annotations

from pathlib import Path

import torch
from gloo import Ranks

from raystow.orchestrator.integrations.save_requests import SaveRequests


def decided(rank: int, n: int) -> list[bool]:
    """Ask on the last rank at the third step; return what is decided at each step."""
    requests, found = SaveRequests(None), list[bool]()
    for step in range(1, 400):
        if step == 3 and rank == n - 1:
            requests.ask()
        found.append(requests.due(step, torch.device("cpu")))
    return found


def test_all_ranks_save_the_same_step_when_one_asks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        first, second = ranks.call(2, decided)
        assert first == second
        assert first.count(True) == 1
    finally:
        ranks.close()
