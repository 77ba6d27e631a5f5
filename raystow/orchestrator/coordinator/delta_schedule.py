"""Delta groups: a whole version and the versions after it that are stored as deltas to it. Decides when a group ends.

Decides from the stored bytes of earlier saves only. See docs/design/015-deltas.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ...storage.format.root import Entry

AUTO: Literal["auto"] = "auto"
"""The value of ``delta`` for groups as long as they reduce the total size."""

Delta = int | Literal["auto"]
"""The most deltas in a group, 0 for none, or ``AUTO``."""

LONGEST = 16
"""The most deltas in a group with ``AUTO``: all are lost with the whole version, and each delta of a longer group would save at
most a 17th more."""

PAYS = 0.95
"""The largest size of a delta, as a part of the whole version: a restore reads both."""

DEEPEST = 8
"""The most versions that references lead through: below the format's limit, so that a version can still be thinned."""

_LONGEST_PAUSE = 16  # whole versions


@dataclass(frozen=True)
class DeltaGroup:
    """A whole version and the deltas to it.

    ``whole``: the newest whole version. ``offered``: started saves that may be deltas to it. ``stored``: bytes of those that
    became versions, in order. ``misses``: groups in a row with deltas that were too large. ``pause``: whole versions
    to store before deltas are tried again. ``depths``: by id, for ``whole`` and the versions that it refers to, the number
    of versions that each consists of.
    """

    whole: Entry
    offered: int = 0
    stored: tuple[int, ...] = ()
    misses: int = 0
    pause: int = 0
    depths: Mapping[int, int] = field(default_factory=dict)

    @property
    def base(self) -> Entry | None:
        """The version that the next one is compared with; None if references would lead through too many versions."""
        return self.whole if self.depths.get(self.whole.id, 1) < DEEPEST else None

    def goes_on(self, delta: Delta) -> tuple[bool, str]:
        """Whether the next version may be a delta to this group's whole version, and the reason.

        With ``AUTO`` a group ends when the next delta is expected to be larger than the mean of the group, the whole version
        included: then the bytes per version are lowest. Deltas are expected to grow as the last one did. A delta is then never
        larger than the whole version, so a restore reads at most twice as much.
        """
        number = self.offered + 1
        if self.base is None:
            return False, f"after references through {DEEPEST} versions"
        if delta != AUTO:
            return self.offered < delta, f"number {number} of {delta}" if self.offered < delta else f"after {delta} deltas"
        if self.pause:
            more = f"{self.pause} more whole version{'s' * (self.pause != 1)}"
            return False, f"deltas did not pay: tried again after {more}"
        if self.stored and self.stored[0] > PAYS * self.whole.stored:
            return False, f"a delta took {self.stored[0] / max(1, self.whole.stored):.2f} of the whole version"
        if self.offered >= LONGEST:
            return False, f"after {LONGEST} deltas"
        if not self.stored:
            return True, f"number {number}; none is stored yet"
        expected = 2 * self.stored[-1] - self.stored[-2] if self.stored[1:] else self.stored[-1]
        mean = (self.whole.stored + sum(self.stored)) / (1 + len(self.stored))
        sizes = f"{expected:,} bytes expected, {mean:,.0f} the mean of the group"
        return expected <= mean, f"number {number}; {sizes}" if expected <= mean else f"after {number - 1} deltas; {sizes}"

    def begun(self) -> DeltaGroup:
        """The group after the start of a save that may be a delta."""
        return replace(self, offered=self.offered + 1)

    def with_delta(self, entry: Entry) -> DeltaGroup:
        """The group after a version that is a delta to this group's whole version, or to that of the group before."""
        if self.whole.id not in entry.bases:
            return self
        paid = bool(self.stored) or entry.stored <= PAYS * self.whole.stored
        return replace(self, stored=(*self.stored, entry.stored), misses=0 if paid else self.misses + 1)


def after(group: DeltaGroup | None, entry: Entry, base: Entry | None) -> DeltaGroup:
    """The group that starts with the whole version ``entry``. ``group``: the group before. ``base``: the version that it
    could have been a delta to; it is whole because deltas were too large, or because the base was in no memory."""
    before = group.depths if group is not None else {}
    depths = {id: before.get(id, DEEPEST) for id in entry.bases}
    depths[entry.id] = 1 + max(depths.values(), default=0)
    if group is None:
        return DeltaGroup(entry, depths=depths)
    if group.pause:
        return DeltaGroup(entry, misses=group.misses, pause=group.pause - 1, depths=depths)
    misses = group.misses + (base == group.whole and not group.stored)
    # The first time no further whole version is stored; then one, three, seven, fifteen.
    pause = min(_LONGEST_PAUSE, 1 << (misses - 1)) - 1 if misses else 0
    return DeltaGroup(entry, misses=misses, pause=pause, depths=depths)
