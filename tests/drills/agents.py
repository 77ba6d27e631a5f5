"""The actors of a training on samples: trainers, a buffer and rollouts, whose states are one version.

A sample is known by its rollout and its number there, in the order of making. The model is the number of times that each sample
was trained. The trainers draw samples by their positions in the buffer. Rank 0 passes the cut to the parts: the samples that the
buffer has received from each rollout. The buffer saves these, if they are not trained yet; a rollout saves the others.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import raystow
from drills.drill_cluster import DEADLINE

TRAINERS = ROLLOUTS = 2
BATCH = 4  # samples of a rank in a step
STEP = TRAINERS * BATCH
EVERY = 10  # steps
MOST = 1 << 17  # samples of a rollout
AHEAD = 20 * STEP  # samples that the buffer may have before they are drawn
PARTS = ("buffer", *(f"rollout-{number}" for number in range(ROLLOUTS)))
OPTIONS: dict[str, Any] = {"timeout": 30.0, "on_failure": "warn", "memory": 32 << 20}

Rows = NDArray[np.int64]
"""Rollout, number and random bits of samples."""


class Actor:
    """What the launcher uses of each actor."""

    def pid(self) -> int:
        return os.getpid()


class Rollout(Actor):
    """Makes samples, and keeps those that a restored buffer may lack."""

    def __init__(self, uri: str, number: int, buffer: Any) -> None:
        self.part = raystow.Part(uri, f"rollout-{number}", **OPTIONS)
        self.number, self.buffer, self.random = number, buffer, np.random.default_rng()
        self.kept: Rows = np.zeros((0, 3), np.int64)
        self.first = 0  # the number of the first that is kept
        self.changing, self.last = threading.Lock(), 1 << 60

    def restore(self) -> None:
        state: dict[str, Any] = {"first": 0, "kept": raystow.AsSaved()}
        if self.part.restore(into=state) is not None:
            self.first, self.kept = state["first"], state["kept"]

    @property
    def made(self) -> int:
        return self.first + len(self.kept)

    def numbers(self) -> tuple[int, int]:
        """Return the number of the first sample that is kept, and of the next that is made."""
        return self.first, self.made

    def work(self) -> int:
        """Make samples, and send them; return their number."""
        sent = self.first
        while self.made < self.last:
            with self.changing:
                numbers = self.made + np.arange(STEP)
                rows = np.stack([np.full(STEP, self.number), numbers, self.random.integers(1 << 62, size=STEP)], axis=1)
                self.kept = np.concatenate([self.kept, rows])
                rows = self.kept[max(0, sent - self.first) :]
            sent = ray.get(self.buffer.put.remote(self.number, rows))
        return self.made

    def finish(self, last: int) -> None:
        """Let ``work`` end after this many samples."""
        assert self.made <= last
        self.last = last

    def follow(self) -> None:
        """Save this part with each save of the trainers."""
        step = 0
        while True:
            begun = self.part.wait_for(step)
            received = received_in(begun.cut)[self.number]
            with self.changing:
                self.first, self.kept = received, self.kept[received - self.first :]
                self.part.save({"first": self.first, "kept": self.kept}, step=begun.step)
            step = begun.step + 1


class Buffer(Actor):
    """Holds samples in the order of arrival. Its first position is a multiple of what a step needs."""

    def __init__(self, uri: str) -> None:
        self.part = raystow.Part(uri, "buffer", **OPTIONS)
        self.rows: Rows = np.zeros((0, 3), np.int64)
        self.first = self.drawn = 0  # positions: of the first row, and of the first that no rank has drawn
        self.received = [0] * ROLLOUTS
        self.changed = threading.Condition()

    def restore(self) -> None:
        state: dict[str, Any] = {"first": 0, "rows": raystow.AsSaved(), "received": self.received}
        if self.part.restore(into=state) is not None:
            self.first = self.drawn = state["first"]
            self.rows, self.received = state["rows"], state["received"]

    def held(self) -> tuple[Rows, list[int]]:
        """Return the samples, and the number of those received from each rollout."""
        return self.rows, self.received

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def put(self, rollout: int, rows: Rows) -> int:
        """Receive samples that are not here yet; return how many this rollout has sent."""
        with self.changed:
            assert rows[0, 1] <= self.received[rollout], "samples are lost"
            self.changed.wait_for(lambda: self.end < self.drawn + AHEAD)
            self.rows = np.concatenate([self.rows, rows[rows[:, 1] >= self.received[rollout]]])
            self.received[rollout] = int(rows[-1, 1]) + 1
            self.changed.notify_all()
            return self.received[rollout]

    def take(self, position: int) -> Rows:
        """Return the batch at a position."""
        with self.changed:
            self.drawn = max(self.drawn, position)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.end >= position + BATCH)
            return self.rows[position - self.first :][:BATCH]

    def cut(self) -> dict[str, object]:
        """Return the present end, and how many samples each rollout has sent."""
        with self.changed:
            return {"end": self.end, **{f"rollout-{number}": received for number, received in enumerate(self.received)}}

    def follow(self) -> None:
        """Save this part with each save of the trainers, as of their cut."""
        step = 0
        while True:
            begun = self.part.wait_for(step)
            first, end = STEP * begun.step, int(str(begun.cut["end"]))
            with self.changed:
                self.first, self.rows = first, self.rows[first - self.first :]
                state = {"first": first, "rows": self.rows[: end - first], "received": received_in(begun.cut)}
                self.part.save(state, step=begun.step)
            step = begun.step + 1


class Trainer(Actor):
    """A rank. ``meeting``: the file by which the ranks find each other."""

    def __init__(self, uri: str, rank: int, buffer: Any, meeting: Path) -> None:
        torch.set_num_threads(1)
        patience = datetime.timedelta(seconds=DEADLINE)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=TRAINERS, timeout=patience)
        self.checkpointer = raystow.Checkpointer(uri, rank=rank, world_size=TRAINERS, parts=PARTS, **OPTIONS)
        self.rank, self.buffer, self.last = rank, buffer, 1 << 60
        self.step, self.counts = 0, torch.zeros((ROLLOUTS, MOST), dtype=torch.int16)

    def restore(self) -> int | None:
        """Restore the newest version; return its id."""
        state = {"step": 0, "counts": self.counts}
        version = self.checkpointer.restore(into=state)
        self.step = int(state["step"])
        return None if version is None else version.id

    def trained(self) -> NDArray[np.int16]:
        """Return how often each sample was trained."""
        return self.counts.numpy()

    def finish(self, last: int) -> None:
        """Let ``work`` end after a step."""
        self.last = last

    def work(self) -> int:
        """Train, and save each tenth step and the last; return the id of the last version."""
        pending = None
        while self.step < self.last:
            mine = torch.from_numpy(ray.get(self.buffer.take.remote(STEP * self.step + BATCH * self.rank)).copy())
            batches = [torch.empty_like(mine) for _ in range(TRAINERS)]
            dist.all_gather(batches, mine)
            self.checkpointer.fence()
            for rollout, number, _ in torch.cat(batches).tolist():
                self.counts[rollout, number] += 1
            self.step += 1
            if self.step % EVERY == 0 or self.step == self.last:
                cut = ray.get(self.buffer.cut.remote()) if self.rank == 0 else None
                pending = self.checkpointer.save({"step": self.step, "counts": self.counts}, step=self.step, cut=cut)
        assert pending is not None
        return pending.result(DEADLINE).id


def received_in(cut: Mapping[str, object]) -> list[int]:
    """Return how many samples the buffer has received from each rollout at a cut."""
    return [int(str(cut[f"rollout-{number}"])) for number in range(ROLLOUTS)]
