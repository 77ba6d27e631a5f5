"""The launcher of a training on a ``DrillCluster``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import ray
from helpers.polling import wait_until
from ray.exceptions import RayError
from safetensors.torch import load_file

import raystow
from drills.drill_cluster import DEADLINE, DrillCluster
from drills.rank import Place, Rank, check_same, wanted

FOR_EVER = 1 << 30  # steps
START = 180.0  # seconds for the start of all ranks, which load torch at the same time


class Training:
    """Starts ranks on nodes, detects dead ranks, ends the others, and starts them again, as a launcher does."""

    def __init__(self, cluster: DrillCluster, folder: Path, **options: Any) -> None:
        self.uri, self._cluster, self.folder = str(folder / "run"), cluster, folder
        self._options = {"memory": 64 << 20, "timeout": 60.0, **options}
        self._group, self._running, self._notes = 0, list[Any](), list[Path]()
        self.ranks: list[Any] = []
        self._processes: list[psutil.Process] = []
        self.places: tuple[str, ...] = ()

    def start(self, *nodes: str) -> None:
        """Start a rank with a Checkpointer on each of these nodes; a repeated node gets several ranks."""
        self._group, self.places = self._group + 1, nodes
        places = [Place(self.folder, self._group, rank, len(nodes)) for rank in range(len(nodes))]
        self.ranks = [
            ray.remote(Rank).options(num_cpus=0, resources={node: 1}).remote(place, self.uri, self._options)
            for place, node in zip(places, nodes, strict=True)
        ]
        self._notes = [place.note for place in places]
        self._processes = [psutil.Process(pid) for pid in self.each("pid", timeout=START)]

    def each(self, method: str, *args: Any, timeout: float = DEADLINE) -> list[Any]:
        """Call a method of all ranks at once, and return all results."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self.ranks], timeout=timeout)

    def rehearse(self, *steps: int, since: str | None = None) -> None:
        """Compute the expected states of these steps before any disturbance; see ``Rank.rehearse``."""
        self.each("rehearse", steps, since)

    def save_at(self, step: int) -> int:
        """Train up to a step, save, and wait until the save is durable; return the version's id."""
        self.each("train", step)
        self.each("save")
        (version,) = set(self.each("result"))
        return int(version)

    def go_on(self, past: int) -> None:
        """Let all ranks train without end; return when all have done ``past`` steps."""
        self._running = [rank.train.remote(FOR_EVER) for rank in self.ranks]
        wait_until(lambda: min(self.steps()) >= past, f"{past} steps")

    def steps(self) -> list[int]:
        """Return the steps that each rank has done, dead or alive."""
        return [int.from_bytes(note.read_bytes(), "little") for note in self._notes]

    def wait_for_failure(self, seconds: float = DEADLINE) -> None:
        """Return when the launcher detects that a rank has died or has lost the others."""
        done, _ = ray.wait(self._running, num_returns=1, timeout=seconds)
        assert done, f"no failure was detected within {seconds:.0f} s"
        try:
            ray.get(done, timeout=10)
        except RayError:
            return
        raise AssertionError("a rank has come to the end of all training")

    def end(self) -> None:
        """Kill all ranks, as a launcher does when one is dead."""
        for rank in self.ranks:
            ray.kill(rank)

    def process(self, rank: int) -> psutil.Process:
        """Return the process of a rank, which works also while the rank is busy."""
        return self._processes[rank]

    def restore(self, timeout: float = DEADLINE) -> tuple[int, Counter[str], float]:
        """Restore on all ranks; return the step, the bytes read by source, and the duration of the slowest rank in seconds."""
        results = self.each("restore", timeout=timeout)
        (step,) = {step for step, _, _ in results}
        read = Counter[str]()
        for _, part, _ in results:
            read.update({"store" if source == "instead" else source: nbytes for source, nbytes in part.items()})
        assert read.total(), "no bytes were logged as read"
        return step, read, max(seconds for _, _, seconds in results)

    def goes_on(self, step: int) -> None:
        """Train up to a step and save; assert that the state and the stored version are the expected ones, and that dead
        processes left nothing behind."""
        version = self.save_at(step)
        self.each("check", len(self.ranks))
        repository = raystow.open(self.uri)
        newest = repository.latest()
        assert newest is not None
        assert newest.id == version
        repository.verify(newest)
        got = {name: newest.read(name) for name in newest.tensors()}
        check_same(got, load_file(wanted(self.folder, len(self.ranks), step)))
        self._cluster.check_nothing_left(self.uri, Counter(self.places))
