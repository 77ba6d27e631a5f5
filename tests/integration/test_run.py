"""``raystow.Run``: each script of ``examples/adoption``, killed and started again, ends with the bits of one that nothing
interrupts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from helpers.polling import wait_until
from ray.cluster_utils import Cluster

import raystow

SCRIPTS = Path(__file__).parents[2] / "examples" / "adoption"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "ddp_run.py"))
END = 24


class Training:
    """A script in a folder of its own, which trains until step ``END``."""

    def __init__(self, folder: Path, address: str, *command: str) -> None:
        self.folder, self._command = folder, command
        self._environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0"}
        folder.mkdir()

    @contextlib.contextmanager
    def started(self, steps: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start it, and kill what is left of it at the end. Yields it and the file that it prints to."""
        printed = self.folder / "printed.txt"
        command = [sys.executable, *self._command, str(steps)]
        with (
            printed.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, env=self._environment) as process,
        ):
            try:
                yield process, printed
            finally:
                kill(process.pid)

    def run(self, steps: int = END) -> str:
        """Run it to its end. Returns what it has printed."""
        with self.started(steps) as (process, printed):
            assert process.wait(timeout=300) == 0, printed.read_text()
        return printed.read_text()

    def run_until(self, *texts: str) -> None:
        """Kill all of it when it has printed these texts."""

        def complete() -> bool:
            return process.poll() is not None or all(text in printed.read_text() for text in texts)

        with self.started(END) as (process, printed):
            wait_until(complete, f"the training prints {texts}", 300)


def kill(pid: int, only: str = "") -> None:
    """Kill a process and its descendants, children first: torchrun would end them otherwise. ``only``: those of this name."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for one in (*first.children(recursive=True), first):
            with contextlib.suppress(psutil.NoSuchProcess):
                if only in " ".join(one.cmdline()):
                    one.kill()


def has_version(uri: Path) -> bool:
    with contextlib.suppress(raystow.NotARepository):
        return raystow.latest(uri) is not None
    return False


def content(uri: Path) -> tuple[int, dict[str, bytes], list[dict[str, object]]]:
    """The step, the bits of all tensors, and the values of all ranks of the newest version."""
    version = raystow.latest(uri)
    assert version is not None
    tensors = {name: version.read(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in version.tensors()}
    ranks = [version.values(rank) for rank in range(version.world_size)]
    unseeded = ("rng.python.", "rng.numpy.")  # which the scripts do not draw from
    return version.step, tensors, [{name: one for name, one in of.items() if not name.startswith(unseeded)} for of in ranks]


@pytest.mark.long
def test_a_killed_ddp_training_resumes_bit_for_bit(tmp_path: Path, cluster: Cluster) -> None:
    """By the journal, which also calls what updates the moving average."""
    whole, killed = (Training(tmp_path / name, cluster.address, *TORCHRUN) for name in ("whole", "killed"))
    assert f"raystow: fresh start: no version at file://{whole.folder}/runs/ddp" in whole.run()
    killed.run_until("step 17: rank 0", "step 17: rank 1")
    resumed = killed.run()
    assert "raystow: resumed at step 1" in resumed
    assert " steps\n" in resumed, "nothing was replayed"
    assert "step 16:" not in resumed
    assert content(killed.folder / "runs" / "ddp") == content(whole.folder / "runs" / "ddp")


@pytest.mark.long
def test_a_killed_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    """It starts a cluster of its own."""
    whole, killed = (Training(tmp_path / name, "local", str(SCRIPTS / "replay_run.py")) for name in ("whole", "killed"))
    assert "raystow: started a Ray cluster on this machine" in whole.run()
    killed.run(12)  # its steps take no time: no version would become durable before the kill
    killed.run_until("step 17:")
    assert "raystow: resumed at step " in killed.run()
    assert content(killed.folder / "runs" / "replay") == content(whole.folder / "runs" / "replay")


@pytest.mark.long
def test_killed_workers_of_ray_train_resume_bit_for_bit(tmp_path: Path) -> None:
    """They are killed after the first of many versions."""
    steps, place = 100, Path("runs", "fsdp2", "raystow")
    whole, killed = (Training(tmp_path / name, "local", str(SCRIPTS / "fsdp2_run.py"), "runs") for name in ("whole", "killed"))
    whole.run(steps)
    with killed.started(steps) as (process, printed):
        wait_until(lambda: process.poll() is not None or has_version(killed.folder / place), "a version", 300)
        kill(process.pid, "RayTrainWorker")
        assert process.wait(timeout=300) == 0, printed.read_text()
    assert "raystow: resumed at step " in printed.read_text()
    assert content(killed.folder / place) == content(whole.folder / place)
    assert content(killed.folder / place)[0] == steps


# Ranks on a shared cluster


def train(uri: str, number: int, world_size: int, fail_at: int, **options: Any) -> tuple[list[int], dict[str, int]]:
    """Train a small model for six steps. Returns the steps, and what the rank has counted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run, steps, counts = raystow.Run(uri, every=2, rank=number, world_size=world_size, **options), list[int](), {"steps": 0}
    run.shared(model=model, optimizer=optimizer)
    run.per_rank(counts=counts, rng=raystow.Rng())
    for step in run.steps(6):
        if step == fail_at:
            raise ZeroDivisionError("in the body")
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts["steps"] += 1
        steps.append(step)
    return steps, counts


def trained(uri: str, world_size: int, fail_at: dict[int, int], **options: Any) -> list[Any]:
    """Train on so many processes of the cluster. Returns a reference to the result of each."""
    place = ray.remote(train).options(num_cpus=0, max_retries=0)
    return [place.remote(uri, number, world_size, fail_at.get(number, 0), **options) for number in range(world_size)]


@pytest.mark.long
def test_an_exception_in_the_body_waits_for_no_other_rank(uri: str, cluster: Cluster) -> None:
    """The other rank saves what it can, and goes on."""
    first, second = trained(uri, 2, {1: 4}, timeout=6.0, on_failure="warn")
    with pytest.raises(ZeroDivisionError):
        ray.get(second, timeout=120)
    assert ray.get(first, timeout=120)[0] == [1, 2, 3, 4, 5, 6]
    assert [version.step for version in raystow.open(uri).versions()] == [2]


def train_until_the_store_breaks(uri: str) -> None:
    state, run = {"w": torch.zeros(2)}, raystow.Run(uri, every=1, rank=0, world_size=1)
    run.shared(state=state)
    for step in run.steps(2):
        state["w"] += 1
        if step == 2:
            wait_until(lambda: has_version(Path(uri)), "a version")
            Path(uri, "versions").rename(Path(uri, "away"))
            Path(uri, "versions").write_text("no folder any more")


def test_a_run_whose_last_save_fails_ends_with_an_error(uri: str, cluster: Cluster) -> None:
    with pytest.raises(raystow.SaveFailed, match="the last save, of step 2, failed: "):
        ray.get(ray.remote(train_until_the_store_breaks).options(num_cpus=0, max_retries=0).remote(uri), timeout=120)


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.long
def test_another_number_of_ranks_continues_at_the_version(journal: bool, uri: str, cluster: Cluster) -> None:
    """Recorded steps are not replayed: what they have recorded of each rank has no rank to go to."""
    for one in trained(uri, 2, {0: 6, 1: 6}, journal=journal):
        with pytest.raises(ZeroDivisionError):
            ray.get(one, timeout=120)
    assert raystow.latest(uri).step == 4  # type: ignore[union-attr]
    results = ray.get(trained(uri, 3, {}, journal=journal), timeout=120)
    assert results == [([5, 6], {"steps": 6})] * 3
    assert raystow.latest(uri).step == 6  # type: ignore[union-attr]
