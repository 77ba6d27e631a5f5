"""Metrics as Ray exports them: through its agent on each node, to Prometheus, as ``ray_<name>``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from ..storage.metrics import Metric, MetricKind, record_with


class RayRecorder:
    """Hands values to Ray, which collects them in this process and sends them every few seconds."""

    def record(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See ``Recorder.record``."""
        instrument = _instrument(metric)
        if metric.kind is MetricKind.GAUGE:
            instrument.set(value, dict(tags))
        elif metric.kind is MetricKind.HISTOGRAM:
            instrument.observe(value, dict(tags))
        elif value > 0:  # Ray refuses to add nothing
            instrument.inc(value, dict(tags))


def export() -> None:
    """Let Ray export what this process records."""
    record_with(RayRecorder())


@functools.cache
def _instrument(metric: Metric) -> Any:
    about = {"description": metric.what, "tag_keys": metric.tags}
    if metric.kind is MetricKind.COUNTER:
        return ray_metrics.Counter(metric.name, **about)
    if metric.kind is MetricKind.GAUGE:
        return ray_metrics.Gauge(metric.name, **about)
    return ray_metrics.Histogram(metric.name, boundaries=list(metric.bounds), **about)
