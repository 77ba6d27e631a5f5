from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from raystow.storage.metrics import DURABLE, METRICS, VERSIONS, Metric, MetricKind, record, record_with

UNITS = ("_seconds", "_bytes", "_ratio")
COUNTED = (
    "saves",
    "versions",
    "attempts",
    "retries",
    "ranks",
    "step",
    "steps",
    "errors",
    "in_flight",
    "in_a_row",
)  # names of metrics without a unit


class Kept:
    def __init__(self, fails: bool = False) -> None:
        self.values: list[tuple[str, float, Mapping[str, str]]] = []
        self._fails = fails

    def record(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        self.values.append((metric.name, value, tags))
        if self._fails:
            raise RuntimeError("no agent")


@pytest.fixture(autouse=True)
def no_recorder() -> Iterator[None]:
    yield
    record_with(None)


def test_record_without_a_recorder_does_nothing() -> None:
    record(VERSIONS, repository="s3://b/run")


def test_values_go_to_the_recorder() -> None:
    kept = Kept()
    record_with(kept)
    record(VERSIONS, repository="s3://b/run")
    record(DURABLE, 2.5, repository="s3://b/run")
    tags = {"repository": "s3://b/run"}
    assert kept.values == [("raystow_versions", 1.0, tags), ("raystow_durable_seconds", 2.5, tags)]


def test_a_failing_recorder_is_removed_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken = Kept(fails=True)
    record_with(broken)
    for _ in range(3):
        record(VERSIONS, repository="s3://b/run")
    assert len(broken.values) == 1
    assert caplog.messages == ["metrics are not recorded any more: raystow_versions could not be"]


def test_names_end_in_their_unit_and_tags_are_few() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("raystow_")
        assert metric.name.endswith(UNITS + COUNTED), metric.name
        assert len(metric.tags) <= 2
        assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.bounds)
