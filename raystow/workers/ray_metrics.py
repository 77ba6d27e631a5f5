"""Metrics as Ray exports them: through its agent on each node, to Prometheus, as ``ray_<name>``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ray.util import metrics as ray_metrics

from ..storage.runtime.metrics import Metric, MetricKind, record_with

_ASCII = "".join(map(chr, range(128)))


def record(metric: Metric, value: float, tags: Mapping[str, str]) -> None:
    """Hand a value to Ray, which collects values in this process and sends them every few seconds."""
    instrument, escaped = _instrument(metric), {name: _escaped(tag) for name, tag in tags.items()}
    if metric.kind is MetricKind.GAUGE:
        instrument.set(value, escaped)
    elif metric.kind is MetricKind.HISTOGRAM:
        instrument.observe(value, escaped)
    elif value > 0:  # Ray refuses to add nothing
        instrument.inc(value, escaped)


def export() -> None:
    """Let Ray export what this process records."""
    record_with(record)


def _escaped(tag: str) -> str:
    """A tag in ASCII, as Ray requires: other characters are percent-encoded, as in URIs (RFC 3986)."""
    return tag if tag.isascii() else quote(tag, _ASCII, errors="surrogatepass")


@functools.cache
def _instrument(metric: Metric) -> Any:
    about = {"description": metric.what, "tag_keys": metric.tags}
    if metric.kind is MetricKind.COUNTER:
        return ray_metrics.Counter(metric.name, **about)
    if metric.kind is MetricKind.GAUGE:
        return ray_metrics.Gauge(metric.name, **about)
    return ray_metrics.Histogram(metric.name, boundaries=list(metric.bounds), **about)
