"""The faults of a world and their rates, which differ by seed, so that rare faults occur alone and together."""

from __future__ import annotations

from dataclasses import dataclass

from .random_source import RandomSource


@dataclass
class FaultRates:
    """Probabilities of faults per store call or per message. ``freezes``: each time a request or its answer travels.
    ``cut_off``: per swap of the root; the process freezes and the answer may be lost.

    In worlds with stale listings no process freezes for a whole grace period: raystow makes no guarantee for both faults
    together (the contract of a store forbids stale listings).
    """

    lost_answer: float = 0.0
    own_refused: float = 0.0
    error: float = 0.0
    slow_down: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    stale: float = 0.0
    corrupted: float = 0.0
    deaths: float = 0.0
    freezes: float = 0.0
    longest_freeze: float = 0.0
    cut_off: float = 0.0
    lost_message: float = 0.0
    late_message: float = 0.0
    doubled_message: float = 0.0
    outages: bool = False
    clock_jumps: bool = False
    takeovers: float = 0.0
    page: int = 1000

    def calm(self) -> None:
        """Set all rates to zero."""
        for name, value in vars(FaultRates()).items():
            setattr(self, name, value)


def draw(rng: RandomSource) -> FaultRates:
    """Draw the fault rates of a seed."""

    def sometimes(share: float, low: float, high: float) -> float:
        return rng.between(low, high) if rng.chance(share) else 0.0

    stale = sometimes(0.25, 0.02, 0.3)
    return FaultRates(
        lost_answer=sometimes(0.6, 0.005, 0.08),
        own_refused=sometimes(0.5, 0.005, 0.1),
        error=sometimes(0.5, 0.003, 0.05),
        slow_down=sometimes(0.5, 0.01, 0.1),
        late=sometimes(0.5, 0.003, 0.05),
        slow=sometimes(0.5, 0.003, 0.03),
        stale=stale,
        corrupted=sometimes(0.3, 0.002, 0.03),
        deaths=sometimes(0.6, 0.0005, 0.006),
        freezes=sometimes(0.6, 0.0005, 0.006),
        longest_freeze=1200.0 if stale else rng.choice([600.0, 4 * 3600.0]),
        cut_off=sometimes(0.4, 0.01, 0.06),
        lost_message=sometimes(0.4, 0.005, 0.05),
        late_message=sometimes(0.4, 0.005, 0.05),
        doubled_message=sometimes(0.4, 0.01, 0.1),
        outages=rng.chance(0.3),
        clock_jumps=rng.chance(0.5),
        takeovers=sometimes(0.7, 0.3, 1.0),
        page=rng.choice([3, 10, 1000]),
    )
