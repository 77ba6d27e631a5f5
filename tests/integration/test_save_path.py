"""The save path on a cluster: several nodes and ranks, changes of tensors after the fence, and failures during a save."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from helpers.polling import wait_until
from helpers.state_equality import same

import raystow
from integration.ranks import Rank, every, start, take
from raystow.orchestrator.coordinator.ray_client import coordinator_actor
from raystow.state import write_check
from raystow.workers.node.actor import NAMESPACE

pytestmark = pytest.mark.usefixtures("cluster")


def replicated(seed: int, megabytes: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    big = {f"layer{i}": torch.randn(megabytes << 16, generator=generator) for i in range(4)}
    small = {f"bias{i}": torch.randn(17 + i, generator=generator) for i in range(40)}
    return {"model": {**big, **small}, "optim": {"lr": 0.1, "betas": (0.9, 0.95)}, "seed": seed}


def test_replicated_tensors_are_stored_once_by_all_ranks(tmp_path: Path) -> None:
    """Each node stores about half of the bytes."""
    ranks = start(str(tmp_path), 4)
    every(ranks, "set", replicated, 1)
    every(ranks, "save", 7, {"loss": 0.5})
    versions = every(ranks, "result")
    assert len({version.id for version in versions}) == 1
    version = raystow.open(tmp_path).latest()
    assert version is not None
    assert (version.step, version.world_size, version.metrics) == (7, 4, {"loss": 0.5})
    state = replicated(1)
    assert version.raw == sum(tensor.nbytes for tensor in state["model"].values())
    loads = [sum(chunk.nbytes for chunk in fragment.chunks) for fragment in version.fragments]
    assert len(loads) == 2  # one fragment for each node
    assert abs(loads[0] - loads[1]) <= 4 << 20  # a chunk
    for name, tensor in state["model"].items():
        assert torch.equal(version.read(f"model.{name}"), tensor)
    every(ranks, "set", replicated, 2)
    every(ranks, "restore")
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks]):
        assert same(got, state)
        assert got["seed"] == 1
    raystow.open(tmp_path).verify(version)


def test_tensors_may_change_after_the_fence(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)

    def save_and_overwrite(self: Rank) -> None:
        self.state = replicated(3, megabytes=32)
        pending = self.checkpointer.save(self.state, step=1)
        self.checkpointer.fence()
        for tensor in self.state["model"].values():
            tensor.fill_(-1.0)
        pending.result(120)

    ray.get(rank.do.remote(save_and_overwrite), timeout=120)
    version = raystow.open(tmp_path).latest()
    assert version is not None
    for name, tensor in replicated(3, megabytes=32)["model"].items():
        assert torch.equal(version.read(f"model.{name}"), tensor)


@pytest.mark.parametrize("write", ["in place", "by .data", "to small tensors"])
def test_a_tensor_that_changes_before_the_fence_fails_the_save(tmp_path: Path, write: str) -> None:
    """A change of small tensors does not, because ``save`` has copied them."""
    (rank,) = start(str(tmp_path), 1, memory=64 << 20)  # far less than the state, so staging has not finished

    def save_and_overwrite(self: Rank, write: str) -> list[str]:
        self.state = replicated(3, megabytes=64)
        pending = self.checkpointer.save(self.state, step=1)
        model = self.state["model"]
        {
            "in place": lambda: model["layer3"].add_(1),
            "by .data": lambda: model["layer3"].data.add_(1),
            "to small tensors": lambda: [model[f"bias{i}"].add_(1) for i in range(40)],
        }[write]()
        try:
            pending.result(120)
        except raystow.SaveFailed as error:
            return [str(error)]
        return []

    failed = ray.get(rank.do.remote(save_and_overwrite, write), timeout=120)
    if write == "to small tensors":
        version = raystow.open(tmp_path).latest()
        assert version is not None
        assert not failed
        assert torch.equal(version.read("model.bias7"), replicated(3, megabytes=64)["model"]["bias7"])
    else:
        assert raystow.open(tmp_path).latest() is None
        assert "model.layer3: the tensor changed while it was being saved" in failed[0]
        assert "fence()" in failed[0]


def test_save_returns_before_encoding_and_the_guard_fences(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1, memory=64 << 20)

    def run(self: Rank) -> bool:
        weight = torch.nn.Parameter(torch.randn(64 << 20))  # 256 MiB through a ring of 32
        optimizer = torch.optim.SGD([weight], lr=1.0)
        self.checkpointer.guard(optimizer)
        before = weight.detach().clone()
        pending = self.checkpointer.save({"w": weight}, step=1)
        unstaged = not pending.staged(0)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        version = pending.result(120)
        assert torch.equal(raystow.open(self.checkpointer.uri).latest().read("w"), before)
        assert 0 < version.record.stall <= pending.stall  # recorded when staging ended, shortly before the step continued
        assert not torch.equal(weight, before)
        assert [found.id for found in self.checkpointer.repository.versions()] == [version.id]
        return unstaged

    assert ray.get(rank.do.remote(run), timeout=120)


def test_a_node_worker_excludes_modules_from_collection(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)
    node = ray.get(rank.do.remote(lambda self: ray.get_runtime_context().get_node_id()))
    worker = ray.get_actor(f"node-{node}", NAMESPACE)
    wait_until(lambda: ray.get(worker.__ray_call__.remote(lambda self: gc.get_freeze_count())) > 50_000, "the modules are frozen")


def test_small_changes_are_deltas_unless_disabled(tmp_path: Path) -> None:
    def row(folder: str, **options: Any) -> list[tuple[int, ...]]:
        (rank,) = start(folder, 1, **options)

        def train(self: Rank) -> None:
            self.state = replicated(4)
            for step in range(3):
                self.checkpointer.save(self.state, step=step).result(120)
                self.state["model"]["layer1"].mul_(1 + 1e-6)

        ray.get(rank.do.remote(train), timeout=120)
        return [entry.bases for entry in raystow.open(folder).root().versions]

    assert row(str(tmp_path / "as it comes")) == [(), (1,), (1,)]
    assert row(str(tmp_path / "whole"), compression=raystow.Compression(delta=0)) == [(), (), ()]


def test_refused_states_name_the_path_and_write_nothing(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)

    def run(self: Rank) -> list[str]:
        loop: dict[str, Any] = {}
        loop["again"] = {"deeper": [loop]}
        bad = [
            {"sched": {"fn": len}},
            {"a": [1, {"b": {1, 2}}]},
            loop,
            {"a": {"b": 1}, "a.b": 2},
            {"a": {(1, 2): 3}},
            {"t": torch.ones(2, 2).to_sparse()},
        ]
        texts = []
        for state in bad:
            with pytest.raises(raystow.StateError) as error:
                self.checkpointer.save(state, step=1)
            texts.append(str(error.value))
        return texts

    texts = ray.get(rank.do.remote(run), timeout=60)
    assert texts[0].startswith('state["sched"]["fn"]: builtin_function_or_method is not a tensor')
    assert texts[1].startswith('state["a"][1]["b"]: set is not')
    assert texts[2].startswith('state["again"]["deeper"][0]: contains itself')
    assert "same name 'a.b'" in texts[3]
    assert "(1, 2) is neither a string nor an integer" in texts[4]
    assert texts[5].startswith('state["t"]: torch.sparse_coo tensors')
    assert not (tmp_path / "versions").exists()


def test_ranks_with_different_plain_tensors_are_reported(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    ray.get([rank.set.remote(lambda n: {f"only{n}": torch.ones(3)}, n) for n, rank in enumerate(ranks)])
    every(ranks, "save", 1)
    message = (
        r"ranks \[1\] hold other plain tensors than rank 0 \(rank 1 has only1 float32 \[3\]; rank 0 has only0 float32 \[3\]\)"
    )
    with pytest.raises(raystow.SaveFailed, match=message):
        every(ranks, "result")
    assert raystow.open(tmp_path).latest() is None


def test_a_failed_save_is_logged_by_one_rank(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    ray.get([rank.set.remote(lambda n: {f"only{n}": torch.ones(3)}, n) for n, rank in enumerate(ranks)])

    def save_and_listen(self: Rank) -> list[str]:
        lines = list[str]()
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda line: lines.append(line.getMessage())  # type: ignore[method-assign]
        logging.getLogger("raystow").addHandler(handler)
        with contextlib.suppress(raystow.SaveFailed):
            self.checkpointer.save(self.state, step=1).result(60)
        with contextlib.suppress(raystow.SaveFailed):  # once more, of the last save
            self.checkpointer.close()
        logging.getLogger("raystow").removeHandler(handler)
        return lines

    lines = sorted(line.split(":")[0] for line in itertools.chain(*every(ranks, "do", save_and_listen)))
    assert lines == [
        "step 1 was not saved",
        "the save of step 1 failed (1 in a row, 1 in total)",
    ]  # by ``close``, and by ``save``


def test_a_rank_that_never_saves_is_named_after_the_deadline(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, timeout=2)
    every(ranks, "set", replicated, 1, 1)
    ray.get(ranks[0].save.remote(1))
    with pytest.raises(raystow.SaveFailed, match=r"save of step 1: ranks \[1\] had not delivered their shards after 2 s"):
        ray.get(ranks[0].result.remote(), timeout=60)
    every(ranks, "save", 2)  # the failed save does not affect the next one
    assert {version.step for version in every(ranks, "result")} == {2}


def test_ranks_that_save_different_steps_fail_immediately(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, timeout=600)
    every(ranks, "set", replicated, 1, 1)
    ray.get(ranks[0].save.remote(1))
    ray.get(ranks[1].save.remote(2))
    results = [rank.result.remote() for rank in ranks]
    (first,), _ = ray.wait(results, timeout=60)  # the save that reached the coordinator first; the other still waits for a rank
    with pytest.raises(
        raystow.SaveFailed, match=r"rank [01] saves step [12] where rank [01] saved step [12]: all ranks must save"
    ):
        ray.get(first)


def test_a_closed_checkpointer_refuses_calls(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)

    def save_after_close(self: Rank) -> list[str]:
        self.checkpointer.close()
        errors = []
        for call in (lambda: self.checkpointer.save({"x": 1}, step=1), lambda: self.checkpointer.restore_latest({"x": 1})):
            try:
                call()
            except raystow.StateError as error:
                errors.append(error.what)
        return errors

    assert ray.get(rank.do.remote(save_after_close), timeout=60) == ["this Checkpointer is closed"] * 2


def test_a_forked_child_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)

    def run(self: Rank) -> str:
        self.checkpointer.save({"w": torch.ones(3)}, step=1).result(60)
        answer, end = os.pipe()
        if not (child := os.fork()):
            signal.alarm(30)  # ends the child, whose calls would wait for threads that it does not have
            for call in (lambda: self.checkpointer.save({}, step=2), lambda: self.checkpointer.restore(into={})):
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except raystow.StateError as error:
                        os.write(end, f"{error.what}\n".encode())
            os._exit(0)
        os.close(end)
        with open(answer) as lines:
            output = lines.read()
        os.waitpid(child, 0)
        self.checkpointer.save({"w": torch.ones(3)}, step=2).result(60)
        return output

    output = ray.get(rank.do.remote(run), timeout=180)
    assert re.fullmatch(r"(this Checkpointer belongs to process \d+, from which this one was forked\n){2}", output)


@pytest.mark.long
def test_a_failure_is_raised_before_the_coordinator_answers(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, timeout=2)
    every(ranks, "set", replicated, 1, 1)

    def report_without_an_answer(self: Rank) -> None:
        self.startup.port.save_failed = lambda *_: threading.Event().wait()  # type: ignore[method-assign,misc]

    ray.get(ranks[0].do.remote(report_without_an_answer))
    ray.get(ranks[0].save.remote(1))
    with pytest.raises(raystow.SaveFailed, match=r"save of step 1: ranks .* had not delivered"):
        ray.get(ranks[0].result.remote(), timeout=60)
    every(ranks, "save", 2)  # the same thread receives the outcome of step 2
    assert {version.step for version in every(ranks, "result")} == {2}


def test_a_killed_node_worker_fails_only_one_save(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1, memory=32 << 20)
    (before,) = ray.get(rank.node_worker_pids.remote())

    def save_and_kill(self: Rank, pid: int) -> str:
        pending = self.checkpointer.save({"w": torch.randn(64 << 20)}, step=1)
        os.kill(pid, signal.SIGKILL)
        self.checkpointer.fence()
        with pytest.raises(raystow.SaveFailed) as error:
            pending.result(60)
        return str(error.value)

    assert "node worker" in ray.get(rank.do.remote(save_and_kill, before), timeout=120)
    every([rank], "set", replicated, 5, 1)
    every([rank], "save", 2)
    assert every([rank], "result")[0].step == 2
    assert ray.get(rank.node_worker_pids.remote()) != [before]
    assert [version.step for version in raystow.open(tmp_path).versions()] == [2]


def test_a_rank_that_dies_while_staging_fails_the_save(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, memory=32 << 20)
    every(ranks, "set", lambda: {"w": torch.randn(32 << 20)})
    pid = ray.get(ranks[1].pid.remote())

    def save_and_die(self: Rank) -> None:
        self.checkpointer.save(self.state, step=1)
        os.kill(os.getpid(), signal.SIGKILL)

    ray.get(ranks[0].save.remote(1))
    ray.get(ranks[0].fence.remote())  # its half does not fit into its memory at once, so the coordinator knows of the save
    ranks[1].do.remote(save_and_die)
    with pytest.raises(
        raystow.SaveFailed, match=rf"rank 1 \(process {pid}\) (died while it was staging|went away before it saved)"
    ):
        ray.get(ranks[0].result.remote(), timeout=60)


def test_a_restarted_rank_fails_saves_that_wait_for_it(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    every(ranks, "set", replicated, 1, 1)
    ray.get(ranks[0].save.remote(1))
    ray.kill(ranks[1])
    ray.get(take("node_b").begin.remote(str(tmp_path), 1, 2, {}))
    with pytest.raises(raystow.SaveFailed, match="rank 1 was restarted"):
        ray.get(ranks[0].result.remote(), timeout=60)


def test_a_killed_coordinator_restarts_with_a_new_epoch(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    every(ranks, "set", replicated, 1, 1)
    every(ranks, "save", 1)
    every(ranks, "result")
    repository = raystow.open(tmp_path)
    epoch = repository.root().epoch
    ray.kill(coordinator_actor(tmp_path.as_uri()), no_restart=False)
    _until(lambda: repository.root().epoch > epoch, ranks)
    every(ranks, "save", 2)
    every(ranks, "result")
    assert [(version.id, version.step) for version in repository.versions()][-1][1] == 2


def _join(rank: Any) -> None:
    rank.startup.port.ask(rank.startup.member)


def _until(reached: Any, ranks: list[Any]) -> None:
    """Call the coordinator until ``reached`` returns true; a call starts the coordinator."""
    for _ in range(100):
        try:
            every(ranks, "do", _join)
        except raystow.ClusterError:
            continue
        if reached():
            return
    raise AssertionError("the coordinator did not restart")


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.long
def test_arrays_may_change_once_save_returns(tmp_path: Path, copied: bool) -> None:
    """numpy counts no writes. ``save`` copies arrays, or returns when they have been read if they are large together."""
    (rank,) = start(str(tmp_path), 1)

    def save_and_overwrite(self: Rank, copied: bool) -> list[float]:
        write_check.UNCOUNTED = (256 if copied else 8) << 20
        table = np.zeros((4096, 1024), np.float32)  # 16 MiB
        rows, stored = itertools.cycle([4000, 7]), list[float]()
        for step in range(30):
            pending, row = self.checkpointer.save({"table": table}, step=step), next(rows)
            before = table[row].copy()
            table[row] = step + 1
            pending.result(120)
            stored.append(float(np.abs(raystow.open(self.checkpointer.uri).latest().read("table", index=row) - before).max()))
        return stored

    try:
        assert ray.get(rank.do.remote(save_and_overwrite, copied), timeout=240) == [0.0] * 30
    finally:
        ray.get(rank.do.remote(lambda self: setattr(write_check, "UNCOUNTED", 256 << 20)))
