from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import empty_record, memory_repository
from helpers.saves import NoNode, checkpointer, save, saves
from torch import nn

from raystow.orchestrator.client import journal_connection
from raystow.orchestrator.client.failure_reports import FailureReports
from raystow.orchestrator.client.failures import Failures
from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.client.saves_in_flight import SavesInFlight
from raystow.orchestrator.journal.recorder import StepRecorder
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import ClusterError, Fenced, OutcomeUnknown, RaystowError, SaveFailed, StateError
from raystow.storage.versions.version import Version
from raystow.workers.staging.progress import SaveProgress


def failures(on_failure: str | int = 3, counted: list[None] | None = None) -> Failures:
    counts = [] if counted is None else counted
    return Failures(on_failure, count=lambda: counts.append(None))


def test_a_failure_is_counted_and_raises_nothing() -> None:
    counted: list[None] = []
    watch = failures(counted=counted)
    text = watch.failed(7, SaveFailed("no space", subject="s3://b/k"))
    watch.check()
    assert (watch.total, watch.in_a_row, len(counted)) == (1, 1, 1)
    assert text == "the save of step 7 failed (1 in a row, 1 in total): s3://b/k: no space"


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        (True, ["it failed"]),
        (False, []),
        (ClusterError("no answer"), ["the failure could not be reported to the coordinator: no answer", "it failed"]),
    ],
)
def test_the_rank_whose_report_is_first_logs_the_failure(
    answer: bool | ClusterError, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def send(number: int, step: int, reason: str) -> bool:
        assert (number, step, reason) == (3, 7, "why")
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    reports = FailureReports(send, logging.getLogger("raystow"))
    with caplog.at_level(logging.WARNING):
        reports.report(3, 7, "why", "it failed")
        reports.flush(60)
    assert caplog.messages == lines


def test_a_failure_is_logged_at_the_end_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    answer = threading.Event()
    reports = FailureReports(lambda *_: answer.wait(60), logging.getLogger("raystow"))
    with caplog.at_level(logging.WARNING):
        reports.report(1, 7, "why", "it failed")
        reports.flush(0)
        answer.set()
        reports.flush(60)
    assert caplog.messages == ["it failed"]


def test_raise_raises_each_failure_once() -> None:
    watch = failures("raise")
    for step in (1, 2):
        error = SaveFailed(f"no {step}")
        watch.failed(step, error)
        with pytest.raises(SaveFailed) as caught:
            watch.check()
        assert caught.value is error
        watch.check()
    watch.failed(3, ClusterError("the node worker is gone"))
    with pytest.raises(SaveFailed, match="save of step 3: the node worker is gone"):
        watch.check()


def test_a_success_does_not_hide_the_first_failure_to_raise() -> None:
    watch = failures("raise")
    watch.failed(1, SaveFailed("no 1"))
    watch.failed(2, SaveFailed("no 2"))
    watch.succeeded()
    with pytest.raises(SaveFailed, match="no 1"):
        watch.check()


def test_n_failures_in_a_row_raise_with_the_last_cause() -> None:
    watch = failures(3)
    for step in range(3):
        watch.failed(step, SaveFailed(f"cause {step}", subject="s3://b/k"))
    with pytest.raises(SaveFailed, match=r"3 saves in a row have failed, the last one: s3://b/k: cause 2 \(.*on_failure"):
        watch.check()
    watch.check()
    watch.failed(4, SaveFailed("again"))
    with pytest.raises(SaveFailed, match="4 saves in a row"):
        watch.check()


@pytest.mark.parametrize("error", [SaveFailed("no space", subject="s3://b/k"), OutcomeUnknown("no answer")])
def test_the_last_failure_is_raised_at_the_end(error: RaystowError) -> None:
    watch = failures(10)
    watch.failed(7, error)
    watch.check()  # the training goes on, and ends before another save
    with pytest.raises(type(error), match=f"the last save, of step 7, failed: {error.what}") as caught:
        watch.check_last()
    assert caught.value.subject == error.subject
    watch.check_last()


@pytest.mark.parametrize("on_failure", ["warn", 10])
def test_the_end_says_nothing_of_earlier_failures(on_failure: str | int) -> None:
    watch = failures(on_failure)
    watch.failed(1, SaveFailed("no space"))
    if on_failure == 10:
        watch.succeeded()
    watch.check_last()


def test_the_end_raises_no_failure_twice() -> None:
    watch = failures("raise")
    watch.failed(1, SaveFailed("no space"))
    with pytest.raises(SaveFailed):
        watch.check()
    watch.check_last()


@pytest.mark.parametrize("on_failure", ["raise", 1, 2])
def test_a_failure_found_durable_raises_nothing(on_failure: str | int) -> None:
    watch, unknown = failures(on_failure), OutcomeUnknown("no answer", subject="save of step 2")
    if on_failure == 2:
        watch.failed(1, SaveFailed("no space"))
        watch.check()
    watch.failed(2, unknown)
    watch.found_durable(unknown)
    watch.check()
    watch.check_last()


def test_a_failure_after_one_found_durable_raises() -> None:
    watch, unknown = failures("raise"), OutcomeUnknown("no answer", subject="save of step 1")
    watch.failed(1, unknown)
    watch.failed(2, SaveFailed("no space"))
    watch.found_durable(unknown)
    with pytest.raises(SaveFailed, match="no space"):
        watch.check()


def test_a_success_resets_the_count_in_a_row() -> None:
    watch = failures()
    for step in range(5):
        watch.failed(step, SaveFailed("no"))
        watch.failed(step, SaveFailed("no"))
        watch.succeeded()
        watch.check()
    assert (watch.total, watch.in_a_row) == (10, 0)


def test_warn_never_raises() -> None:
    watch = failures("warn")
    for step in range(1000):
        watch.failed(step, SaveFailed("no"))
        watch.check()
    assert watch.in_a_row == 1000


@pytest.mark.parametrize(
    ("on_failure", "said"),
    [("ignore", "on_failure is 'ignore'.*one of raise, warn"), (0, "on_failure is 0"), (-1, "is -1"), (True, "is True")],
)
def test_an_invalid_on_failure_is_refused(on_failure: str | int, said: str) -> None:
    with pytest.raises(StateError, match=said):
        failures(on_failure)


def test_a_save_that_raises_on_one_rank_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks count their saves alike."""
    rank = checkpointer(monkeypatch, node := NoNode(), on_failure="raise")
    rank.failures.failed(1, SaveFailed("no space"))
    with pytest.raises(SaveFailed, match="no space"):
        rank.save({}, step=2)
    with pytest.raises(StateError, match="metrics"):
        rank.save({}, step=2, metrics={"loss": object()})
    rank.save({}, step=2)
    assert node.numbers == [3]


def test_the_journal_learns_of_a_save_before_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node worker cannot be reached, so that it does not know of the failure."""
    events = list[str]()

    class Recorder(StepRecorder):
        def saved(self, step: int) -> None:
            events.append(f"saved {step}")

        def save_failed(self, step: int) -> None:
            events.append(f"failed {step}, attempts {node.numbers}")

    monkeypatch.setattr(journal_connection, "StepRecorder", Recorder)
    rank, model = checkpointer(monkeypatch, node := NoNode()), nn.Linear(2, 2)
    with contextlib.closing(rank.journal(model, torch.optim.SGD(model.parameters()))):
        assert rank.save({"w": np.ones(3)}, step=3).done()
    assert events == ["saved 3", "failed 3, attempts [1]"]


def test_fenced_after_an_unknown_outcome_is_raised_by_save() -> None:
    watch, fenced = failures("warn"), Fenced("epoch 2 is in charge", subject="s3://b")
    outcome = save(1, failures=watch)
    outcome.report(OutcomeUnknown("no answer", subject="save of step 1"))
    assert outcome.wait(60)
    watch.check()
    outcome.report(fenced)
    for call in (Pending(outcome).result, watch.check):
        with pytest.raises(Fenced) as caught:
            call()
        assert caught.value is fenced
    assert watch.total == 1


def test_a_failure_is_counted_before_result_returns() -> None:
    done = list[bool]()
    outcome = save(failures=Failures("warn", count=lambda: done.append(outcome.wait(0))))
    outcome.report(SaveFailed("no space"))
    assert done == [False]
    assert outcome.wait(0)


def test_the_end_raises_what_nobody_has_raised() -> None:
    watch = failures("raise")
    watch.check_last()
    watch.failed(1, SaveFailed("no 1"))
    with pytest.raises(SaveFailed, match="no 1"):
        watch.check()
    watch.check_last()
    watch.failed(2, SaveFailed("no 2"))
    with pytest.raises(SaveFailed, match="no 2"):
        watch.check_last()
    watch.check_last()


def test_the_end_raises_fenced_once() -> None:
    watch = failures(10)
    watch.failed(1, Fenced("epoch 2 is in charge", subject="s3://b"))
    with pytest.raises(Fenced):
        watch.check_last()
    watch.check_last()
    with pytest.raises(Fenced):
        watch.check()


def test_the_end_raises_after_n_failures_in_a_row() -> None:
    watch = failures(2)
    watch.failed(1, SaveFailed("no 1"))
    watch.check()
    watch.failed(2, SaveFailed("no 2"))
    with pytest.raises(SaveFailed, match="2 saves in a row"):
        watch.check_last()


def saves_ended_with(*outcomes: Version | RaystowError | None) -> SavesInFlight:
    """Saves of steps 10, 20, ... with these outcomes; None for one that has not ended."""
    in_flight = saves()
    for number, outcome in enumerate(outcomes, 1):
        in_flight.wait_for_oldest()
        save = in_flight.begin(SaveProgress(10 * number, number=number))
        if outcome is not None:
            save.report(outcome.entry if isinstance(outcome, Version) else outcome)
            assert save.wait(60)
    return in_flight


def a_version() -> Version:
    repository = memory_repository()
    committer = Committer(repository, "me")
    return committer.commit(empty_record(committer))


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ((), ""),
        (("version",), ""),
        ((SaveFailed("no space"), "version"), ""),
        ((SaveFailed("no space"),), "step 10 was not saved: no space; this process has saved no version"),
        (("version", SaveFailed("no space")), "step 20 was not saved: no space; the newest version is {id} (step {step})"),
        (
            ("version", SaveFailed("no space"), Fenced("no more")),
            "step 30 was not saved: no more; the newest version is {id} (step {step})",
        ),
        (
            ("version", OutcomeUnknown("no answer")),
            "step 20 may not have been saved: no answer; the newest version is {id} (step {step})",
        ),
        (("version", None), "step 20 may not have been saved: the save has not ended; the newest version is {id} (step {step})"),
    ],
)
def test_the_log_says_once_that_the_newest_step_was_not_saved(
    outcomes: tuple[Any, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    version = a_version()
    in_flight = saves_ended_with(*(version if outcome == "version" else outcome for outcome in outcomes))
    with caplog.at_level(logging.ERROR):
        in_flight.log_unsaved()
        in_flight.log_unsaved()
    assert caplog.messages == ([said.format(id=version.id, step=version.step)] if said else [])


def test_the_log_names_the_version_that_was_restored() -> None:
    in_flight, version = saves_ended_with(SaveFailed("no space")), a_version()
    in_flight.restored = version
    assert in_flight.unsaved().endswith(f"saved no version, and has restored version {version.id} (step {version.step})")
