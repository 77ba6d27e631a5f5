"""The metrics of raystow, and the one way to record a value.

Values go to the recorder of the process (``workers.ray_metrics`` in a Ray process); without one they are dropped. Recording never
raises.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_SHORT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LONG = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class MetricKind(enum.Enum):
    """How values of a metric are combined."""

    COUNTER = "counter"  # added to a growing sum
    GAUGE = "gauge"  # the last one counts
    HISTOGRAM = "histogram"  # counted in buckets


@dataclass(frozen=True)
class Metric:
    """A metric. ``name`` ends in its unit, except for counts. ``tags``: names of the tags of each value. ``bounds``: of a
    histogram's buckets."""

    name: str
    kind: MetricKind
    what: str
    tags: tuple[str, ...] = ("repository",)
    bounds: tuple[float, ...] = ()


Recorder = Callable[[Metric, float, Mapping[str, str]], None]
"""Takes one value and its tags to a metrics system, from any thread, without blocking."""


def _counter(name: str, what: str, *tags: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, what, ("repository", *tags))


def _gauge(name: str, what: str, *tags: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, what, tags or ("repository",))


def _seconds(name: str, what: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, what, bounds=bounds)


# Every process.
THREAD_ERRORS = Metric("raystow_thread_errors", MetricKind.COUNTER, "Unexpected errors in background threads.", ("thread",))

# Training processes.
STALL = _counter("raystow_stall_seconds", "Time for which save and fence have held up the training loop.", "call")
STAGED = _seconds("raystow_staged_seconds", "From save until the node worker has all of it.", _LONG)
DURABLE = _seconds("raystow_durable_seconds", "From save until there is a version.", _LONG)
FAILED_SAVES = _counter("raystow_failed_saves", "Saves of a rank that became no version.")
FAILED_EXPORTS = _counter("raystow_failed_exports", "Exports of versions that failed.")
RESTORE = _seconds("raystow_restore_seconds", "From restore until the state of a rank is filled.", _LONG)
RESTORED = _counter("raystow_restored_bytes", "Stored bytes that restores have read, by where from.", "source")
JOURNALED = _counter("raystow_journaled_bytes", "Bytes of the entries of recorded steps.")
UNRECORDED = _counter("raystow_unrecorded_steps", "Steps that could not be recorded.")

# Node workers.
UPLOADED = _counter("raystow_uploaded_bytes", "Bytes that the store has taken from a node.")
RETRIES = _counter("raystow_store_retries", "Requests to the store that were sent again.")
STALE = _counter("raystow_stale_saves", "Saves with the same optimizer state as the one before.")
UPLOADS = _gauge("raystow_uploads_in_flight", "Objects on their way from a node to the store.", "node")
QUEUE = _gauge("raystow_queue_bytes", "Bytes being coded, or coded and not uploaded yet.", "node")
QUEUE_LIMIT = _gauge("raystow_queue_limit_bytes", "What the queue may grow to; then saves wait.", "node")
MEMORY_TIER = _gauge("raystow_memory_tier_bytes", "Bytes kept in a node's memory to restore from.", "node")
MEMORY_TIER_LIMIT = _gauge("raystow_memory_tier_limit_bytes", "What Memory(cache=) allows.", "node")
JOURNAL_MEMORY = _gauge("raystow_journal_memory_bytes", "Bytes of entries of recorded steps in a node's memory.", "node")
RECORDED_STEP = _gauge("raystow_recorded_step", "The newest step in a node's memory.", "repository", "node")
REPLICAS_WANTED = _gauge(
    "raystow_replicas_wanted_bytes", "Copies on other nodes that a node sees to: what there should be.", "node"
)
REPLICAS_PRESENT = _gauge("raystow_replicas_present_bytes", "The part of them that is there.", "node")
RANKS = _gauge("raystow_connected_ranks", "Training processes that are connected to a node's worker.", "repository", "node")

# Coordinators.
VERSIONS = _counter("raystow_versions", "Versions committed.")
RAW = _counter("raystow_raw_bytes", "Bytes of the tensors in versions committed.")
STORED = _counter("raystow_stored_bytes", "What they take in the store.")
RATIO = _gauge("raystow_stored_ratio", "Stored bytes by raw bytes of the newest version.")
COMMIT = _seconds("raystow_commit_seconds", "Writing the record of a version and swapping the root.", _SHORT)
ABORTED = _counter("raystow_aborted_attempts", "Attempts given up.")
ABORTED_IN_A_ROW = _gauge("raystow_aborted_attempts_in_a_row", "Attempts given up since the newest version.")
OPEN = _gauge("raystow_open_attempts", "Attempts under way.")
NEWEST = _gauge(
    "raystow_newest_version_timestamp_seconds",
    "When the newest version was made, since 1970; without one, when the coordinator began.",
)
DURABLE_STEP = _gauge("raystow_durable_step", "The newest step in the store: of a version, or of a segment of the journal.")
DIFFERENCES = _counter(
    "raystow_replica_differences", "Tensors and plain values of which ranks held other bits than others, in each save.", "kind"
)
DAMAGED = _counter("raystow_damaged_versions", "Versions that a restore found damaged.")

METRICS = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
"""All of them."""

_recorder: Recorder | None = None
_refused: set[str] = set()  # names of metrics with an error, which is logged once, not with each save


def record_with(recorder: Recorder | None) -> None:
    """Send values of this process to ``recorder`` from now on; None drops them."""
    global _recorder
    _recorder = recorder
    _refused.clear()


def record(metric: Metric, value: float = 1.0, **tags: str) -> None:
    """Record one value of a metric, with all its tags, from any thread. Costs microseconds, and never raises."""
    recorder = _recorder
    if recorder is None:
        return
    try:
        recorder(metric, value, tags)
    except Exception:
        if metric.name not in _refused:
            _refused.add(metric.name)
            logger.exception("a value of the metric %s could not be recorded", metric.name)
