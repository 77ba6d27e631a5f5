"""Results that ranks of a cluster get when an answer is lost, or when another run writes to the same repository."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.polling import wait_until
from msgspec.structs import replace

import raystow
from integration.ranks import Rank, every, save_state, start, take
from raystow.orchestrator.coordinator.ray_client import RayCoordinatorClient, coordinator_actor
from raystow.storage.commit.committer import Committer
from raystow.workers.node.actor import NAMESPACE
from raystow.workers.node.session import Session
from raystow.workers.protocol.messages import FindOutcome, PartStored, Ticket

pytestmark = pytest.mark.usefixtures("cluster")


def small(seed: int = 1) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(seed))}


def _suppress_versions(_: Any) -> None:
    """Stop this node worker from reporting versions to its ranks."""
    tell = Session.tell

    def report_errors(self: Session, save: int, outcome: Any, *warnings: Any) -> None:
        if isinstance(outcome, raystow.RaystowError):
            tell(self, save, outcome, *warnings)

    Session.tell = report_errors  # type: ignore[method-assign]


def test_a_committed_save_succeeds_though_its_worker_died(tmp_path: Path) -> None:
    """The node worker dies after the commit and before its report to the rank."""
    (rank,) = start(str(tmp_path), 1)
    every([rank], "set", small)
    every([rank], "save", 1)
    every([rank], "result")
    node = ray.get(rank.do.remote(lambda self: ray.get_runtime_context().get_node_id()))
    (pid,) = ray.get(rank.node_worker_pids.remote())
    ray.get(ray.get_actor(f"node-{node}", NAMESPACE).__ray_call__.remote(_suppress_versions))
    every([rank], "save", 2)
    wait_until(lambda: raystow.open(tmp_path).latest().step == 2, "the commit")  # type: ignore[union-attr]
    assert not ray.get(rank.do.remote(lambda self: self.pending[0].done()))
    os.kill(pid, signal.SIGKILL)
    assert every([rank], "result")[0].step == 2
    counts = ray.get(rank.do.remote(lambda self: (self.checkpointer.failures.total, self.checkpointer.failures.in_a_row)))
    assert counts == (0, 0)


def test_a_restarted_coordinator_knows_committed_attempts(tmp_path: Path) -> None:
    """A repeated report of a committed attempt returns its version; a report of another attempt raises an error."""
    (rank,) = start(str(tmp_path), 1)
    every([rank], "set", small)
    every([rank], "save", 1)
    version = every([rank], "result")[0]
    repository = raystow.open(tmp_path)
    epoch, record = repository.root().epoch, version.record
    ray.kill(coordinator_actor(tmp_path.as_uri()), no_restart=False)
    port = RayCoordinatorClient(tmp_path.as_uri())
    ticket = Ticket(version.id, version.entry.attempt, 0, 60.0, 1)
    part = PartStored(ticket, record.fragments[0])
    entry = _called(lambda: port.ask(part).entry)
    assert entry == version.entry
    assert repository.root().epoch == epoch + 1
    assert port.ask(FindOutcome(version.id, version.entry.attempt)).entry == version.entry
    with pytest.raises(raystow.SaveFailed, match="became no version"):
        port.ask(replace(part, ticket=Ticket(version.id + 1, "f" * 16, 0, 60.0, 2)))


def _called(call: Any) -> Any:
    """Repeat a call while the coordinator restarts, and return its answer."""
    answer: list[Any] = []

    def answered() -> bool:
        try:
            answer.append(call())
        except raystow.ClusterError:
            return False
        return True

    wait_until(answered, "an answer of the coordinator")
    return answer[0]


def _train_fenced(self: Rank) -> list[str]:
    """Save until this rank is fenced; return the errors of ``result``, ``save`` and ``fence``."""
    messages = []
    pending = self.checkpointer.save(self.state, step=2)
    for call in (pending.result, lambda: self.checkpointer.save(self.state, step=3), self.checkpointer.fence):
        try:
            call()
            messages.append("")
        except raystow.Fenced as error:
            messages.append(str(error))
    return messages


def test_a_fenced_run_stops_and_names_the_other_run(tmp_path: Path) -> None:
    """The other run is on another cluster, and has taken the next epoch."""
    (rank,) = start(str(tmp_path), 1)
    every([rank], "set", small)
    every([rank], "save", 1)
    every([rank], "result")
    Committer(raystow.open(tmp_path), "coordinator 7 on other-host, job 03000000, since 2026-11-24 21:00:00 UTC (0a)")
    for message in ray.get(rank.do.remote(_train_fenced), timeout=60):
        assert "coordinator 7 on other-host, job 03000000, since 2026-11-24 21:00:00 UTC" in message
        assert "stop it or give it a URI of its own" in message
        assert str(tmp_path) in message
    with pytest.raises(raystow.Fenced):  # the same job again, as after a restart of its workers
        every([rank], "begin", str(tmp_path), 0, 1, {})
    every([rank], "begin", str(tmp_path), 0, 1, {"on_fenced": "takeover"})
    every([rank], "set", small)
    every([rank], "save", 4)
    assert every([rank], "result")[0].step == 4


def test_a_run_with_takeover_takes_the_repository_back(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1, on_fenced="takeover")
    every([rank], "set", small)
    every([rank], "save", 1)
    every([rank], "result")
    repository = raystow.open(tmp_path)
    other = Committer(repository, "the other run")
    every([rank], "save", 2)
    with pytest.raises(raystow.SaveFailed, match="'the other run' has replaced epoch 1; this run takes over again"):
        every([rank], "result")
    wait_until(lambda: repository.root().epoch == other.epoch + 1, "the next epoch")
    assert f"on {os.uname().nodename}, job " in repository.root().owner
    every([rank], "save", 3)
    assert every([rank], "result")[0].step == 3


@pytest.mark.parametrize("on_fenced", ["raise", "takeover"])
def test_two_runs_on_one_cluster_are_distinguished(tmp_path: Path, on_fenced: str) -> None:
    (older,) = start(str(tmp_path), 1, on_fenced=on_fenced)
    (newer,) = start(str(tmp_path), 1)
    every([older, newer], "set", small)
    if on_fenced == "takeover":
        every([older], "save", 1)
        assert every([older], "result")[0].step == 1
    else:
        pid = ray.get(newer.pid.remote())
        for message in ray.get(older.do.remote(_train_fenced), timeout=60):
            assert f"process {pid} on {os.uname().nodename}, job " in message
            assert "UTC has taken up this rank after process" in message
            assert "on_fenced" in message
        every([newer], "save", 1)
        assert every([newer], "result")[0].step == 1


def test_a_replaced_process_stays_so_after_a_restart(tmp_path: Path) -> None:
    """The coordinator is restarted, and the replaced process is the first to call the new one."""
    (older,) = start(str(tmp_path), 1)
    (newer,) = start(str(tmp_path), 1)
    every([older, newer], "set", small)
    every([newer], "save", 1)
    every([newer], "result")
    ray.kill(coordinator_actor(tmp_path.as_uri()), no_restart=False)
    wait_until(lambda: _reports_a_failure(older), "the restart of the coordinator")
    every([newer], "save", 2)
    assert every([newer], "result")[0].step == 2
    with pytest.raises(raystow.Fenced, match="has taken up this rank"):
        ray.get(older.do.remote(lambda self: self.checkpointer.restore_latest(self.state)), timeout=60)


def _reports_a_failure(rank: Any) -> bool:
    try:
        return bool(ray.get(rank.do.remote(lambda self: self.startup.report_failure(9, 9, "it was frozen")), timeout=60))
    except raystow.ClusterError:
        return False


def test_an_old_rank_does_not_end_the_restore_of_a_smaller_run(tmp_path: Path) -> None:
    """No process of the smaller run has its rank."""
    *_, last = old = start(str(tmp_path), 3)
    save_state(old, 1, small)
    first, second = new = start(str(tmp_path), 2)
    every(new, "set", small)
    restored = first.restore.remote()  # waits for the other rank
    with pytest.raises(raystow.Fenced, match="has begun a run of world size 2 after"):
        ray.get(last.restore.remote(), timeout=60)
    assert {version.id for version in ray.get([restored, second.restore.remote()], timeout=60)} == {1}


def _close_after_a_failed_save(self: Rank, uri: str, on_failure: str | int, end: str) -> dict[str, Any]:
    """Save a step, break the store, save another one, and end. Return what was raised, and logged as an error."""
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda line: logged.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raystow").addHandler(handler)
    raised, checkpointer, versions = (
        "",
        raystow.Checkpointer(uri, rank=0, world_size=1, on_failure=on_failure),
        Path(uri, "versions"),
    )
    try:
        with checkpointer if end != "close" else contextlib.nullcontext():
            checkpointer.save(small(1), step=1).result(60)
            versions.rename(Path(uri, "away"))
            versions.write_text("no folder any more")
            checkpointer.save(small(2), step=2)
            if end == "error":
                raise ArithmeticError("the loss is not finite")
        checkpointer.close()
    except (ArithmeticError, raystow.RaystowError) as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("raystow").removeHandler(handler)
        versions.unlink()
        Path(uri, "away").rename(versions)
    checkpointer.close()  # does nothing
    return {"raised": raised, "logged": [line for line in logged if "newest version" in line]}


@pytest.mark.parametrize(
    ("on_failure", "end"), [("raise", "with"), ("raise", "error"), (1, "close"), (10, "close"), (10, "with"), ("warn", "close")]
)
def test_a_training_says_at_its_end_what_was_not_saved(tmp_path: Path, on_failure: str | int, end: str) -> None:
    found = ray.get(take("node_a").do.remote(_close_after_a_failed_save, str(tmp_path), on_failure, end), timeout=120)
    if end == "error":
        assert found["raised"] == "ArithmeticError: the loss is not finite"
    elif on_failure == "warn":
        assert found["raised"] == ""
    else:
        assert found["raised"].startswith("SaveFailed: ")
    if on_failure == 10:
        assert "the last save, of step 2, failed: " in found["raised"]
    (line,) = found["logged"]
    assert line.startswith("step 2 was not saved: ")
    assert line.endswith("; the newest version is 1 (step 1)")
    assert [version.step for version in raystow.open(tmp_path).versions()] == [1]
