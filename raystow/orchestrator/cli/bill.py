"""What checkpoints cost in a month: stored bytes and waiting GPUs, at the user's prices. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

DAYS = 30
"""Of a month."""

MONTH = DAYS * 86400
"""Seconds of a month."""

GB = 10**9
"""Bytes that a store's price is for."""


@dataclass(frozen=True)
class Prices:
    """Dollars: of a GPU for an hour, and of a GB (10^9 bytes) in the store for a month."""

    gpu_hour: float
    gb_month: float


@dataclass(frozen=True)
class Habit:
    """How a run saves: ``gpus`` wait together, ``every`` so many seconds, and the newest ``keep`` versions stay."""

    gpus: int
    every: float
    keep: int

    @property
    def saves(self) -> float:
        """In a month."""
        return MONTH / self.every


@dataclass(frozen=True)
class Bill:
    """A month of saves of ``stored`` bytes each, for which the training loop waits ``stall`` seconds. ``held``: bytes of all that
    is kept, if these are known; else as many versions of that size as are kept."""

    habit: Habit
    prices: Prices
    stored: float
    stall: float
    held: float | None = None

    @property
    def kept(self) -> float:
        """Bytes in the store, once there are as many versions as are kept."""
        return self.stored * self.habit.keep if self.held is None else self.held

    @property
    def written(self) -> float:
        """Bytes in a month."""
        return self.stored * self.habit.saves

    @property
    def store_dollars(self) -> float:
        """For what is kept, in a month."""
        return self.kept / GB * self.prices.gb_month

    @property
    def stalled(self) -> float:
        """Seconds in a month."""
        return self.stall * self.habit.saves

    @property
    def gpu_hours(self) -> float:
        """That GPUs wait in a month."""
        return self.stalled / 3600 * self.habit.gpus

    @property
    def gpu_dollars(self) -> float:
        """For GPUs that wait, in a month."""
        return self.gpu_hours * self.prices.gpu_hour

    @property
    def dollars(self) -> float:
        """In all, in a month."""
        return self.store_dollars + self.gpu_dollars


def break_even(plain: Bill, coded: Bill) -> float | None:
    """Seconds that a save may stall the loop longer by compression until that has eaten what the store saves; None where no
    GPU costs anything."""
    per_second = plain.habit.gpus * plain.prices.gpu_hour / 3600 * plain.habit.saves
    return (plain.store_dollars - coded.store_dollars) / per_second if per_second else None
