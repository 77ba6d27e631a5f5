"""What a verification says of one version, and of all of them, to a person and to a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...storage.errors import RaystowError
from .present import count, out, say, size
from .reporting import complain, described

if TYPE_CHECKING:
    from ...storage.verify import Verified
    from ...storage.version import Version

OUTCOMES = WHOLE, REMOVED, DAMAGED, UNTRUSTED, UNCHECKED = "whole", "removed", "damaged", "untrusted", "unchecked"
"""As written; removed by retention meanwhile; not as written; not signed by a trusted key; not looked at to the end, since the
store failed or this machine cannot decode it. Of those that are no good the worst comes first."""

QUICK, DEEP = "quick", "deep"
"""Modes: packs by their sizes; every byte."""


@dataclass(frozen=True)
class Verdict:
    """One version's outcome. ``found`` where it is whole, ``error`` where it is no good; ``seconds``: how long it took.
    ``dependents``: ids of the versions that are differences to one that is no good."""

    version: Version
    mode: str
    outcome: str
    seconds: float
    found: Verified | None = None
    error: RaystowError | None = None
    dependents: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON form."""
        version, found = self.version, self.found
        row = {"id": version.id, "step": version.step, "outcome": self.outcome, "mode": self.mode}
        row |= {"raw": version.raw, "stored": version.bytes, "seconds": round(self.seconds, 3)}
        if found is not None:
            row |= {"tensors": found.tensors, "chunks": found.chunks, "packs": found.packs}
            row |= {"read": found.read, "resumed": found.resumed}
        row |= {"dependents": list(self.dependents)} if self.dependents else {}
        return row | ({"error": described(self.error)} if self.error is not None else {})

    def tell(self) -> None:
        """Print it; what is wrong goes to stderr."""
        name = f"version {self.version.id} (step {self.version.step})"
        if self.found is not None:
            say(f"{name}: whole, {_what(self.found, self.mode)} ({self.seconds:.1f} s)")
        elif self.error is not None:
            out.print(f"{name}: {self.outcome.upper()}", style="bold red")
            complain(described(self.error))
            if self.dependents:
                say(f"versions that are differences to it, and of no use without it: {', '.join(map(str, self.dependents))}")
        else:  # its objects went with it: no damage
            out.print(f"{name}: removed from the repository meanwhile")


def summary(verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """The JSON form of the sums over all versions."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    found = [verdict.found for verdict in verdicts if verdict.found is not None]
    return {
        "versions": len(verdicts),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "stored": sum(verdict.version.bytes for verdict in verdicts),
        "read": sum(one.read for one in found),
        "resumed": sum(one.resumed for one in found),
        "seconds": round(seconds, 3),
    }


def tell_summary(sums: dict[str, Any], mode: str, resumed_from: str) -> None:
    """Print the sums; ``resumed_from`` names the journal, if there is one."""
    outcomes = [f"{sums[outcome]} {outcome}" for outcome in OUTCOMES if sums[outcome]]
    taken = f", {size(sums['resumed'])} taken from {resumed_from}" if resumed_from else ""
    read = (
        "no pack was read: --deep reads them" if mode == QUICK else f"{size(sums['read'])} read{taken} in {sums['seconds']:.1f} s"
    )
    say(f"{', '.join(outcomes)}; {read}", style="dim")


def _what(found: Verified, mode: str) -> str:
    counts = f"{count(found.tensors, 'tensor')}, {count(found.chunks, 'chunk')}"
    if mode == QUICK:
        return f"{counts}, {size(found.stored)} in {count(found.packs, 'pack')}"
    return f"{counts}, {size(found.read)} read" + (f" and {size(found.resumed)} before" if found.resumed else "")
