from __future__ import annotations

import logging

import pytest

from raystow.orchestrator.failures import Failures
from raystow.storage.errors import ClusterError, SaveFailed, StateError


def failures(on_failure: str = "warn", most: int | None = 3, counted: list[None] | None = None) -> Failures:
    counts = [] if counted is None else counted
    return Failures(on_failure=on_failure, most=most, count=lambda: counts.append(None))


def test_a_failure_is_counted_and_logged_in_one_line_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[None] = []
    watch = failures(counted=counted)
    with caplog.at_level(logging.WARNING):
        watch.failed(7, SaveFailed("no room", subject="s3://b/k"))
    watch.check()
    assert (watch.total, watch.in_a_row, len(counted)) == (1, 1, 1)
    assert caplog.messages == ["the save of step 7 failed (1 in a row, 1 in all): s3://b/k: no room"]


def test_raise_raises_each_failure_once() -> None:
    watch = failures("raise", None)
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


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_too_many_in_a_row_raise_in_either_mode_with_their_number_and_the_last_cause(on_failure: str) -> None:
    watch = failures(on_failure)
    for step in range(3):
        watch.failed(step, SaveFailed(f"cause {step}", subject="s3://b/k"))
    with pytest.raises(SaveFailed, match=r"3 saves in a row have failed, the last one: s3://b/k: cause 2 \(.*max_failures"):
        watch.check()
    watch.check()
    watch.failed(4, SaveFailed("again"))
    with pytest.raises(SaveFailed, match="4 saves in a row"):
        watch.check()


def test_a_success_begins_anew() -> None:
    watch = failures()
    for step in range(5):
        watch.failed(step, SaveFailed("no"))
        watch.failed(step, SaveFailed("no"))
        watch.succeeded()
        watch.check()
    assert (watch.total, watch.in_a_row) == (10, 0)


def test_without_a_limit_training_goes_on_for_ever() -> None:
    watch = failures(most=None)
    for step in range(1000):
        watch.failed(step, SaveFailed("no"))
        watch.check()
    assert watch.in_a_row == 1000


@pytest.mark.parametrize(
    ("on_failure", "most", "said"),
    [("ignore", 3, "on_failure 'ignore' is none of warn, raise"), ("warn", 0, "max_failures is 0"), ("raise", -1, "is -1")],
)
def test_what_makes_no_sense_is_refused(on_failure: str, most: int, said: str) -> None:
    with pytest.raises(StateError, match=said):
        failures(on_failure, most)
