"""Trainers, a buffer and rollouts on three nodes, killed at random moments: each sample is trained exactly once.

A run prints its seed, and ``RAYSTOW_DRILL_SEED`` repeats its kills.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from helpers.polling import wait_until
from ray.exceptions import RayError

import raystow
from drills.agents import ROLLOUTS, STEP, TRAINERS, Buffer, Rollout, Trainer
from drills.drill_cluster import DEADLINE, DrillCluster
from drills.drill_report import Drill, Stopwatch
from drills.training import START
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.slow

KILLS = 20
PLACES = {"trainer 0": 0, "trainer 1": 1, "buffer": 2, "rollout 0": 1, "rollout 1": 2}
"""Actor -> which of the three nodes it is on."""
SURVIVED = ("coordinator", "node worker")
"""What may die in a training without a restart of it."""
VICTIMS = (*PLACES, *SURVIVED, "raylet", "node")
LONGEST, RESTORING = 6.0, 0.7  # seconds until a kill, in a training and in a restore


class AgentRun:
    """The launcher: it starts all actors together, and starts them again when one has died."""

    def __init__(self, cluster: DrillCluster, folder: Path) -> None:
        self.uri, self._cluster, self._folder, self._starts = str(folder / "run"), cluster, folder, 0
        self.actors = dict[str, Any]()
        self._working = list[Any]()
        self._pids = dict[str, int]()

    def start(self) -> None:
        """Start all actors on three nodes."""
        self._starts += 1
        while len(self._cluster.nodes) < 3:
            self._cluster.add(f"n{self._starts}-{len(self._cluster.nodes)}")
        nodes, meeting = list(self._cluster.nodes), self._folder / f"meeting-{self._starts}"

        def make(kind: type, name: str, *args: Any) -> None:
            options = {"num_cpus": 0, "max_concurrency": 8, "resources": {nodes[PLACES[name]]: 1}}
            self.actors[name] = ray.remote(kind).options(**options).remote(self.uri, *args)

        make(Buffer, "buffer")
        for rank in range(TRAINERS):
            make(Trainer, f"trainer {rank}", rank, self.actors["buffer"], meeting)
        for number in range(ROLLOUTS):
            make(Rollout, f"rollout {number}", number, self.actors["buffer"])
        pids = ray.get([actor.pid.remote() for actor in self.actors.values()], timeout=START)
        self._pids = dict(zip(self.actors, pids, strict=True))

    def begin_restore(self) -> list[Any]:
        """Let all actors restore; return the calls, of the buffer, the trainers and the rollouts."""
        return [actor.restore.remote() for actor in self.actors.values()]

    def restore(self) -> int:
        """Restore the newest version; return its id, or 0 if there is none."""
        _, *ids, _, _ = ray.get(self.begin_restore(), timeout=START)
        (id,) = set(ids)
        return id or 0

    def work(self) -> None:
        """Let all actors work, without waiting for them."""
        self._working = [actor.work.remote() for name, actor in self.actors.items() if name != "buffer"]
        self._working += [actor.follow.remote() for name, actor in self.actors.items() if "trainer" not in name]

    def kill(self, victim: str, node: str) -> None:
        """Send SIGKILL to an actor or other process; ``node``: the name of the node if it is one of its processes."""
        if victim in self._pids:
            os.kill(self._pids[victim], signal.SIGKILL)
        elif victim == "coordinator":
            self._cluster.coordinator().kill()
        elif victim == "node worker":
            self._cluster.node_worker(node).kill()
        elif victim == "raylet":
            self._cluster.kill_raylet(node)
        else:
            self._cluster.kill(node)

    def end(self) -> None:
        """Kill all actors, and wait for their ends."""
        for actor in self.actors.values():
            ray.kill(actor)
        wait_until(lambda: not any(map(psutil.pid_exists, self._pids.values())), "the ends of all actors")

    def wait_for_failure(self) -> None:
        """Return when an actor has failed."""
        done, _ = ray.wait(self._working, num_returns=1, timeout=DEADLINE)
        assert done, "no failure was detected"
        with pytest.raises(RayError):
            ray.get(done)

    def goes_on(self) -> None:
        """Wait until a save that begins now or later is a version; all actors work on."""
        begun = self.newest() + 3  # two saves are in flight at most

        def committed() -> bool:
            done, _ = ray.wait(self._working, num_returns=1, timeout=0)
            ray.get(done)
            assert not done, "an actor has ended"
            return self.newest() > begun

        wait_until(committed, "a new version", DEADLINE)

    def finish(self, more: int) -> list[int]:
        """Let each rollout make as many samples, more than the one with most has now, and train all; return their numbers."""
        last = more + max(self.ask(f"rollout {number}", "numbers")[1] for number in range(ROLLOUTS))
        for rank in range(TRAINERS):
            self.ask(f"trainer {rank}", "finish", ROLLOUTS * last // STEP)
        for number in range(ROLLOUTS):
            self.ask(f"rollout {number}", "finish", last)
        _, _, *made = ray.get(self._working[: TRAINERS + ROLLOUTS], timeout=DEADLINE)
        return made

    def newest(self) -> int:
        """Return the id of the newest version, or 0."""
        version = raystow.open(self.uri).latest()
        return 0 if version is None else version.id

    def ask(self, name: str, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.actors[name], method).remote(*args), timeout=DEADLINE)

    def check(self) -> None:
        """Assert that each sample that was made is in one place: trained once, in the buffer, or with its rollout."""
        counts = [self.ask(f"trainer {rank}", "trained") for rank in range(TRAINERS)]
        assert np.array_equal(*counts)
        rows, received = self.ask("buffer", "held")
        check_samples(counts[0], rows, received, [self.ask(f"rollout {number}", "numbers") for number in range(ROLLOUTS)])

    def check_version(self, version: raystow.Version) -> None:
        """``check`` for a stored version."""
        first = [version.read(f"[part rollout-{number}].first") for number in range(ROLLOUTS)]
        kept = [len(version.read(f"[part rollout-{number}].kept")) for number in range(ROLLOUTS)]
        received = [version.read(f"[part buffer].received.{number}") for number in range(ROLLOUTS)]
        counts, rows = version.read("counts").numpy(), version.read("[part buffer].rows")
        assert counts.sum() == STEP * version.step
        check_samples(counts, rows, received, list(zip(first, np.add(first, kept), strict=True)))


def check_samples(counts: Any, rows: Any, received: list[int], numbers: list[tuple[int, int]]) -> None:
    """``numbers``: the first sample that each rollout keeps, and the first that it has not made."""
    found = Counter[tuple[int, int]]()
    for rollout, number in np.argwhere(counts):
        found[int(rollout), int(number)] += int(counts[rollout, number])
    found.update((int(rollout), int(number)) for rollout, number, _ in rows)
    for rollout, (first, made) in enumerate(numbers):
        assert first <= received[rollout] <= made
        found.update((rollout, number) for number in range(received[rollout], made))
    made = {(rollout, number) for rollout, (_, made) in enumerate(numbers) for number in range(made)}
    wrong = {sample: times for sample, times in found.items() if times != 1 or sample not in made}
    assert not wrong
    assert made == found.keys()


def test_each_sample_is_trained_once_whatever_is_killed(
    cluster: DrillCluster, tmp_path: Path, report: Callable[[Drill], None]
) -> None:
    seed = int(os.environ.get("RAYSTOW_DRILL_SEED") or SYSTEM.token(), 16) % (1 << 32)
    print(f"RAYSTOW_DRILL_SEED={seed:x}")
    random, run, restored, slowest = np.random.default_rng(seed), AgentRun(cluster, tmp_path), set[int](), 0.0
    victims = [str(one) for one in random.permutation([*VICTIMS, *VICTIMS, *random.choice(VICTIMS, KILLS - 2 * len(VICTIMS))])]
    run.start()
    assert run.restore() == 0
    run.work()
    run.goes_on()
    for count, victim in enumerate(victims, 1):
        seconds, node = float(random.uniform(0, LONGEST)), str(random.choice(list(cluster.nodes)))
        in_restore = bool(random.random() < 0.25)
        if in_restore:
            run.end()
            run.start()
            calls, seconds = run.begin_restore(), seconds * RESTORING / LONGEST
        print(f"kill {count}: {victim}{f' on {node}' if victim in VICTIMS[-3:] else ''}, {seconds:.1f} s into", end=" ")
        print(f"a {'restore' if in_restore else 'training'}, newest version {run.newest()}", flush=True)
        SYSTEM.sleep(seconds)  # a random moment
        watch = Stopwatch()
        run.kill(victim, node)
        if victim in SURVIVED and not in_restore:
            run.goes_on()
            continue
        if in_restore:
            ray.wait(calls, num_returns=len(calls), timeout=DEADLINE)
        else:
            run.wait_for_failure()
        run.end()
        run.start()
        restored.add(version := run.restore())
        assert version >= run.newest() > 0
        run.check()
        run.work()
        run.goes_on()
        slowest = max(slowest, watch.seconds())
    assert len(restored) > 3
    made = run.finish(200 * STEP)
    versions = raystow.open(run.uri).versions()
    for version in versions:
        run.check_version(version)
    counts = versions[-1].read("counts").numpy()
    for rollout, number in enumerate(made):
        assert (counts[rollout, :number] == 1).all()
        assert not counts[rollout, number:].any()
    report(Drill(f"{KILLS} of trainers, parts, node workers, coordinator, nodes", 0.0, "newest version of all", slowest))
