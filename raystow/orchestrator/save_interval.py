"""How often to save: the interval at which saves and failures together cost the least time. Pure arithmetic.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974; J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (3), 2006.
With an interval T, a save that costs C seconds and failures every M seconds, saves take C / T of the time and failures lose
T / (2 M) of it. The sum is least at T = sqrt(2 C M). Restarts cost the same at every T.
"""

from __future__ import annotations

import math

LEAST = 60.0
"""Seconds from save to save at least, if nobody has given the time between failures: it is a guess then."""

_NODE_FAILURES = 6.5e-3  # a day and node of eight GPUs: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine
# Learning Research Clusters", HPCA 2025, arXiv:2410.21680
_NODE_RANKS = 8


def best_interval(cost: float, mtbf: float, budget: float | None = None, *, least: float = 0.0) -> float:
    """The seconds from save to save that lose the least time.

    Args:
        cost: Seconds by which a save delays the training, at least 0.
        mtbf: Mean seconds between failures, above 0.
        budget: The largest share of the time that saves may take, above 0; None for no limit.
        least: Seconds from save to save at least: saves that follow faster than they become durable wait for each other.

    Returns:
        The interval; at most ``mtbf``, unless ``budget`` or ``least`` asks for more.
    """
    interval = min(math.sqrt(2 * cost * mtbf), mtbf)  # the approximation is for intervals well below the time between failures
    return max(interval, least, cost / budget if budget is not None else 0.0)


def time_between_failures(span: float, failures: int, ranks: int) -> float:
    """The mean time between failures of a run.

    Args:
        span: Seconds for which the run has been observed.
        failures: The failures in that time.
        ranks: The number of ranks, at least 1.

    Returns:
        Seconds: as observed. With less than two failures, since one restart may have been planned, that which a large study of
        clusters found, or ``span`` if that is longer.
    """
    if failures > 1:
        return span / failures
    return max(span, 86400 * _NODE_RANKS / (_NODE_FAILURES * ranks))


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """The share of the time that is lost to saves and to work that failures undo; times in seconds, ``interval`` above 0."""
    return cost / interval + interval / (2 * mtbf)
