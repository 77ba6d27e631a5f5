"""``Checkpointer.due`` with several ranks: all ranks save the same steps, chosen by time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raystow
from integration.ranks import Rank, every, start
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.usefixtures("cluster")


class VersionFile:
    """Appends the step of each version to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_version(self, version: raystow.Version) -> None:
        with open(self.path, "a") as file:
            file.write(f"{version.step}\n")


def save_due_steps(self: Rank, number: int, first: int) -> list[int]:
    """Train until ``number`` steps were due and saved; return these steps."""
    checkpointer, due, step = self.checkpointer, list[int](), first
    while len(due) < number:
        SYSTEM.sleep(0.002 * (checkpointer.rank + 1))  # ranks run at different rates
        if checkpointer.due(step):
            checkpointer.save({"w": torch.full((64,), float(step))}, step=step).result(60)
            due.append(step)
        step += 1
    return due


def test_all_ranks_save_the_same_due_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = start(str(tmp_path), 3, interval=raystow.Interval(seconds=0.2), callbacks=[VersionFile(str(log))])
    by_time = every(ranks, "do", save_due_steps, 3, 0)
    assert by_time[0] == by_time[1] == by_time[2]
    every(ranks, "leave")
    assert log.read_text().split() == [str(step) for step in by_time[0]]  # rank 0 calls the callback, and close waits for it
    every(ranks, "do", _begin, str(tmp_path))
    chosen = every(ranks, "do", save_due_steps, 2, by_time[0][-1] + 1)
    assert chosen[0] == chosen[1] == chosen[2]
    assert [version.step for version in raystow.open(tmp_path).versions()] == by_time[0] + chosen[0]


def _begin(self: Rank, uri: str) -> None:
    """Restart as the same rank with a time between failures so short that the best interval is one step."""
    made = self.checkpointer
    self.begin(uri, made.rank, made.world_size, {"interval": raystow.Interval(mtbf=1e-3)})


def test_steps_are_due_by_number_and_on_request_of_one_rank(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, interval=raystow.Interval(steps=3))

    def due(self: Rank) -> list[int]:
        return [step for step in range(10) if self.checkpointer.due(step)]

    def requested(self: Rank) -> int:
        step, never = 10, raystow.Interval(steps=10**9)
        if self.checkpointer.rank == 1:
            self.checkpointer.save_now()
        while not self.checkpointer.due(step, never):
            SYSTEM.sleep(0.002 * (self.checkpointer.rank + 1))
            step += 1
        return step

    assert every(ranks, "do", due) == [[3, 6, 9]] * 2
    assert len(set(every(ranks, "do", requested))) == 1
