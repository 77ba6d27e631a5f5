"""What each way to store less has saved in a repository, what it costs, and when to do without. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...storage.chains import line
from ...storage.format.root import Entry
from ...storage.retention.freeing import estimate
from ..row import PAYS
from .present import billed, count


@dataclass(frozen=True)
class Saving:
    """``stored``: bytes of all that a technique was used for, ``instead``: what they would take without it, about. ``told``: what
    it was used for, what it costs, and when to turn it off."""

    technique: str
    stored: int
    instead: int
    told: str


def savings(entries: Sequence[Entry], derived: int) -> list[Saving]:
    """Of the versions of a repository; ``derived``: bytes of the newest that follow from others of its bytes."""
    return [
        *([_derived(derived, entries[-1].raw)] if derived else []),
        *_differences(entries),
        *_thinned(entries),
    ]


def _derived(derived: int, raw: int) -> Saving:
    what = f"{billed(derived)} of the newest version's {billed(raw)} follow from the rest, and take nothing"
    return Saving("derived", 0, derived, f"{what}; it costs a comparison of digests, and there is nothing to turn off")


def _differences(entries: Sequence[Entry]) -> list[Saving]:
    by_id = {entry.id: entry for entry in entries}
    lines = [of for entry in entries if (of := line(by_id, entry))[1:]]
    if not lines:
        return []
    stored, instead = sum(of[0].stored for of in lines), sum(estimate(of[0], of[-1]) for of in lines)
    reads = sum(estimate(of[0], one) for of in lines for one in of) / max(1, instead)  # of each no more than it needs
    what = f"{count(len(lines), 'difference')} between versions, of {billed(stored)} instead of about {billed(instead)}"
    if stored > PAYS * instead:
        return [Saving("delta", stored, instead, f"{what}: they do not pay here, pass `delta=None`")]
    cost = f"a restore of one reads {reads:.2f} times as much as of a whole version; where that is too long, pass `delta=None`"
    return [Saving("delta", stored, instead, f"{what}; {cost}")]


def _thinned(entries: Sequence[Entry]) -> list[Saving]:
    thin, full = [entry for entry in entries if not entry.resumable], [entry for entry in entries if entry.resumable]
    if not thin or not full:
        return []
    stored, instead = sum(entry.stored for entry in thin), len(thin) * sum(entry.stored for entry in full) // len(full)
    what = f"{count(len(thin), 'thinned version')}, of {billed(stored)} instead of about {billed(instead)}"
    return [Saving("thinning", stored, instead, f"{what}; nothing resumes from them: to keep that, prune without `--resumable`")]
