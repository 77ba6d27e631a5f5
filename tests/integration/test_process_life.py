"""The life of a training process: connections that end, generators of random numbers, several Checkpointers, forks, and scripts
that end without ``close``. Each script runs in a process of its own, on the shared cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import raystow

_SECONDS = 300

_START = """
import atexit, contextlib, os, random, sys
import numpy, torch

uri, trials = sys.argv[1], int(sys.argv[2])
state = {"w": torch.ones(1000)}


def generators():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
"""

_SHUT_DOWN = """
import ray, raystow
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1)
checkpointer.save(state, step=1).result(60)
from raystow.workers.protocol.messages import FindOutcome
port = checkpointer._startup.port
ray.shutdown()
address = os.environ.pop("RAY_ADDRESS")
calls = {
    "save": lambda: checkpointer.save(state, step=2),
    "restore": lambda: checkpointer.restore(state),
    "restore_latest": lambda: checkpointer.restore_latest(state),
    "due": lambda: checkpointer.due(2),
    "prepare": lambda: checkpointer.prepare(state),
    "journal": lambda: checkpointer.journal(model, optimizer),
    "node worker": checkpointer._startup.node_address,
    "coordinator": lambda: port.ask(FindOutcome(1, "a")),
}


def refused(said):
    for name, call in calls.items():
        try:
            print(name, call())
        except raystow.ClusterError as error:
            assert said in str(error) and "make another Checkpointer" in str(error), error


refused("ray.shutdown() was called")
assert not ray.is_initialized()
checkpointer.fence()
ray.init(address=address, log_to_driver=False)
refused("this process has connected again since")
with raystow.Checkpointer(uri, rank=0, world_size=1) as another:
    assert another.restore(state).step == 1
    another.save(state, step=3).result(60)
ray.shutdown()
checkpointer.close()
assert not ray.is_initialized()
print(raystow.open(uri).latest().step)
"""

_RANDOM = """
before = generators()
import raystow
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = (*before[:2], generators()[2])  # the model draws


def same(call):
    assert generators() == before, call


checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1)
same("Checkpointer()")
checkpointer.due(1)
same("due")
pending = checkpointer.save(state, step=1)
same("save")
checkpointer.fence()
pending.result(60)
same("result")
checkpointer.restore(state)
same("restore")
journal = checkpointer.journal(model, optimizer)
same("journal")
checkpointer.close()
same("close")
raystow.restore_latest(uri, into=state)
same("raystow.restore_latest")
print("same")
"""

_SUCCESSORS = """
import ray, raystow
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.workers.node.actor import NAMESPACE
for trial in range(trials):
    match trial % 4:
        case 0:
            with raystow.Checkpointer(uri, rank=0, world_size=1):
                pass
        case 1:
            with raystow.Checkpointer(uri, rank=0, world_size=1) as first:
                first.due(trial)
        case 2:
            first = raystow.Checkpointer(uri, rank=0, world_size=1)  # never closed
        case 3:
            with raystow.Checkpointer(uri, rank=0, world_size=1) as first:
                first.restore(state)
    with raystow.Checkpointer(uri, rank=0, world_size=1) as second:
        assert second.save(state, step=trial).result(60).step == trial
    ray.kill(ray.get_actor(coordinator_name(second.uri), NAMESPACE))  # the next two race for a new one
print(trials)
"""

_OLDER = """
import raystow
older = raystow.Checkpointer(uri, rank=0, world_size=1)
older.save(state, step=1).result(60)
newer = raystow.Checkpointer(uri, rank=0, world_size=1)
newer.save(state, step=2).result(60)
try:
    older.save(state, step=3).result(60)
except raystow.Fenced:
    print("fenced")
newer.save(state, step=4).result(60)
newer.close()
with contextlib.suppress(raystow.Fenced):
    older.close()
"""

_FORK = """
import raystow
checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1)
checkpointer.save(state, step=1).result(60)
pending = checkpointer.save(state, step=2)
if not (child := os.fork()):
    refused = 0
    for call in (
        lambda: checkpointer.save(state, step=3),
        lambda: checkpointer.restore(state),
        lambda: checkpointer.due(3),
        checkpointer.fence,
        lambda: raystow.Checkpointer(uri, rank=0, world_size=1),
    ):
        with contextlib.suppress(raystow.StateError, raystow.ClusterError):
            call()
            continue
        refused += 1
    checkpointer.close()
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pending.result(60).step)
print(checkpointer.save(state, step=4).result(60).step)
checkpointer.close()
"""

_UNCLOSED = """
import raystow
checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1)
checkpointer.save(state, step=1).result(60)
checkpointer.save({"w": torch.ones(1 << 20)}, step=2)
"""

_UNCLOSED_DOWN = """
import ray, raystow
checkpointer = raystow.Checkpointer(uri, rank=0, world_size=1, on_failure=ON_FAILURE)
checkpointer.save(state, step=1).result(60)
os.rename(uri, uri + ".away")
open(uri, "w").close()
checkpointer.save(state, step=2)
"""

_UNCLOSED_WAITING = """
import raystow
from raystow.orchestrator.client import exit_notice
exit_notice.PATIENCE = 0.5
checkpointer = raystow.Checkpointer(uri, rank=0, world_size=2)  # no rank 1 saves
checkpointer.save(state, step=7)
"""


def run(script: str, cluster: Cluster, uri: Path, trials: int = 1, *, status: int = 0) -> tuple[str, str]:
    """Run a script with a repository as its argument; return its stdout and stderr. ``status``: the exit status to expect."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", _START + script, str(uri), str(trials)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS * max(1, trials // 10))
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
def test_nothing_connects_after_shutdown(cluster: Cluster, tmp_path: Path) -> None:
    """Every call raises ClusterError, also once the process is connected again; a new Checkpointer works."""
    assert run(_SHUT_DOWN, cluster, tmp_path / "r")[0] == "3\n"


@pytest.mark.long
def test_random_numbers_stay_those_of_the_training(cluster: Cluster, tmp_path: Path) -> None:
    assert run(_RANDOM, cluster, tmp_path / "r")[0] == "same\n"


@pytest.mark.parametrize("trials", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_checkpointer_after_another_saves(cluster: Cluster, tmp_path: Path, trials: int) -> None:
    printed, _ = run(_SUCCESSORS, cluster, tmp_path / "r", trials)  # with what Ray prints about killed actors
    assert str(trials) in printed.splitlines()
    assert len(raystow.open(tmp_path / "r").versions()) == trials


@pytest.mark.long
def test_of_two_checkpointers_the_newer_one_has_the_rank(cluster: Cluster, tmp_path: Path) -> None:
    assert run(_OLDER, cluster, tmp_path / "r")[0] == "fenced\n"
    assert [version.step for version in raystow.open(tmp_path / "r").versions()] == [1, 2, 4]


def test_a_forked_child_is_refused_and_disturbs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    assert run(_FORK, cluster, tmp_path / "r")[0] == "5 2\n4\n"


def test_the_end_of_a_script_waits_for_its_saves(cluster: Cluster, tmp_path: Path) -> None:
    assert "durable" not in run(_UNCLOSED, cluster, tmp_path / "r")[1]
    latest = raystow.open(tmp_path / "r").latest()
    assert latest is not None
    assert latest.step == 2


@pytest.mark.parametrize(
    ("script", "said", "status"),
    [
        (_UNCLOSED_DOWN.replace("ON_FAILURE", "10"), "the newest version is 1 (step 1)", 120),
        (_UNCLOSED_DOWN.replace("ON_FAILURE", "'warn'"), "the newest version is 1 (step 1)", 0),
        (_UNCLOSED_WAITING, "step 7 may not have been saved: the save has not ended; this process has saved no version", 120),
    ],
    ids=["failed", "failures are warnings", "not ended"],
)
def test_the_end_of_a_script_names_what_is_not_durable(
    cluster: Cluster, tmp_path: Path, script: str, said: str, status: int
) -> None:
    errors = run(script, cluster, tmp_path / "r", status=status)[1]
    assert errors.count("the process ends without close()") == 1
    assert said in errors
