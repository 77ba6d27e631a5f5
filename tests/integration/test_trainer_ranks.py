"""Ranks of a trainer that decide together, in a real process group."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.memory_run import MemoryRun

from integration.gloo import Ranks
from raystow.integrations.save_requests import SaveRequests


def decided(rank: int, n: int) -> list[bool]:
    """Ask on the last rank before the last step but one of two trainings; return what is decided at each step. At another step
    the coordinator would decide: see ``test_due``."""
    requests, found = SaveRequests(MemoryRun(looks=False), counts=True), list[bool]()
    for first in 1, 4:
        if first == 1 and rank == n - 1:
            requests.ask()
        found += [requests.due(step, torch.device("cpu"), last=step == first + 2) for step in range(first, first + 3)]
    return found


def test_all_ranks_save_the_last_step_when_one_asks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        assert ranks.call(2, decided) == [[False, False, True, False, False, False]] * 2
    finally:
        ranks.close()
