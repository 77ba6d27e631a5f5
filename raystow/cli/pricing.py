"""The monthly cost of checkpoints at the user's prices, and what each technique saves. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..orchestrator.coordinator.delta_schedule import PAYS
from ..storage.format.root import Entry
from ..storage.retention.compaction_policy import estimate
from ..storage.root.delta_chain import base_chain
from .output import billed, count

DAYS = 30  # per month
MONTH = DAYS * 86400  # seconds
GB = 10**9  # the unit of the store's price


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU and hour, and per GB (10^9 bytes) and month in the store."""

    gpu_hour: float
    gb_month: float


@dataclass(frozen=True)
class Schedule:
    """How a run saves: ``gpus`` that wait together, seconds between saves, and versions that are kept."""

    gpus: int
    every: float
    keep: int

    @property
    def saves(self) -> float:
        """Saves per month."""
        return MONTH / self.every


@dataclass(frozen=True)
class Bill:
    """A month of saves: bytes of a version, in the store, and written; seconds of stall of a save, and of all; and the cost."""

    stored: float
    kept: float
    written: float
    store_dollars: float
    stall: float
    stalled: float
    gpu_hours: float
    gpu_dollars: float
    dollars: float


def monthly_bill(schedule: Schedule, prices: Prices, *, stored: float, stall: float, kept: float | None = None) -> Bill:
    """Return the bill for saves of ``stored`` bytes that each stall the training loop for ``stall`` seconds. ``kept``: bytes of
    all kept versions where known; otherwise each has ``stored`` bytes."""
    kept = stored * schedule.keep if kept is None else kept
    store_dollars = kept / GB * prices.gb_month
    stalled = stall * schedule.saves
    gpu_hours = stalled / 3600 * schedule.gpus
    gpu_dollars = gpu_hours * prices.gpu_hour
    return Bill(
        stored=stored,
        kept=kept,
        written=stored * schedule.saves,
        store_dollars=store_dollars,
        stall=stall,
        stalled=stalled,
        gpu_hours=gpu_hours,
        gpu_dollars=gpu_dollars,
        dollars=store_dollars + gpu_dollars,
    )


def break_even(schedule: Schedule, prices: Prices, store_saving: float) -> float | None:
    """Return the extra stall per save, in seconds, that costs as much as compression saves in the store; None if GPUs are
    free."""
    per_second = schedule.gpus * prices.gpu_hour / 3600 * schedule.saves
    return store_saving / per_second if per_second else None


@dataclass(frozen=True)
class Saving:
    """What a technique saves: bytes ``stored`` with it, about ``instead`` without it, and an ``explanation``."""

    technique: str
    stored: int
    instead: int
    explanation: str


def savings(entries: Sequence[Entry], derived: int) -> list[Saving]:
    """Return what each technique saves in a repository; ``derived``: bytes of the newest version that follow from its other
    bytes."""
    return [*([_derived(derived, entries[-1].raw)] if derived else []), *_deltas(entries), *_thinned(entries)]


def _derived(derived: int, raw: int) -> Saving:
    what = f"{billed(derived)} of the newest version's {billed(raw)} are derived from the rest and take no space"
    return Saving("derived", 0, derived, f"{what}; this costs a comparison of digests and needs no option")


def _deltas(entries: Sequence[Entry]) -> list[Saving]:
    by_id = {entry.id: entry for entry in entries}
    chains = [chain for entry in entries if (chain := base_chain(by_id, entry))[1:]]
    if not chains:
        return []
    stored, instead = sum(chain[0].stored for chain in chains), sum(estimate(chain[0], chain[-1]) for chain in chains)
    reads = sum(estimate(chain[0], one) for chain in chains for one in chain) / max(1, instead)  # of each only what it needs
    what = f"{count(len(chains), 'delta')} between versions: {billed(stored)} instead of about {billed(instead)}"
    if stored > PAYS * instead:
        return [Saving("delta", stored, instead, f"{what}; they do not pay here, use `delta=0`")]
    cost = f"restoring one reads {reads:.2f} times as much as a whole version; if that is too slow, use `delta=0`"
    return [Saving("delta", stored, instead, f"{what}; {cost}")]


def _thinned(entries: Sequence[Entry]) -> list[Saving]:
    thin, full = [entry for entry in entries if not entry.resumable], [entry for entry in entries if entry.resumable]
    if not thin or not full:
        return []
    stored, instead = sum(entry.stored for entry in thin), len(thin) * sum(entry.stored for entry in full) // len(full)
    what = f"{count(len(thin), 'thinned version')}: {billed(stored)} instead of about {billed(instead)}"
    return [
        Saving("thinning", stored, instead, f"{what}; no training can resume from them: prune without `--resumable` to keep that")
    ]
