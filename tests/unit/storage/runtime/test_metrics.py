from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from ray.util import metrics as ray_metrics

from raystow.storage.runtime.metrics import DURABLE, METRICS, VERSIONS, Metric, MetricKind, record, record_with
from raystow.workers import ray_metrics as exported

UNITS = ("_seconds", "_bytes", "_ratio")
COUNTED = (
    "exports",
    "saves",
    "versions",
    "attempts",
    "retries",
    "ranks",
    "step",
    "steps",
    "errors",
    "differences",
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
    record_with(kept.record)
    record(VERSIONS, repository="s3://b/run")
    record(DURABLE, 2.5, repository="s3://b/run")
    tags = {"repository": "s3://b/run"}
    assert kept.values == [("raystow_versions", 1.0, tags), ("raystow_durable_seconds", 2.5, tags)]


def test_an_error_of_a_metric_is_logged_once_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken = Kept(fails=True)
    record_with(broken.record)
    for metric in (VERSIONS, VERSIONS, DURABLE, VERSIONS):
        record(metric, repository="s3://b/run")
    assert len(broken.values) == 4
    assert caplog.messages == [
        "a value of the metric raystow_versions could not be recorded",
        "a value of the metric raystow_durable_seconds could not be recorded",
    ]


@pytest.mark.parametrize("uri", ["s3://b/größe", "/data/実験", "/data/\udce9", "/a b%2F\n"])
def test_ray_takes_tags_of_any_characters(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """It refuses tags that are not ASCII."""
    record_with(exported.record)
    for metric in METRICS:
        record(metric, **dict.fromkeys(metric.tags, uri))
    assert caplog.messages == []


def test_tags_that_are_not_ascii_are_percent_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(ray_metrics.Counter, "inc", lambda self, value, tags: seen.append(tags))
    exported.record(VERSIONS, 1.0, {"repository": "s3://b/größe 1%"})
    assert seen == [{"repository": "s3://b/gr%C3%B6%C3%9Fe 1%"}]


def test_names_end_in_their_unit_and_tags_are_few() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("raystow_")
        assert metric.name.endswith(UNITS + COUNTED), metric.name
        assert len(metric.tags) <= 2
        assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.bounds)
