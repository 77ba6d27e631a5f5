"""Rows: a whole version and those after it that are differences to it. When one goes on, when it ends, when there is to be none.

Decides only, by plain data: what the saves so far have stored. See docs/design/015-deltas.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..storage.format.root import Entry

AUTO: Literal["auto"] = "auto"
"""What ``delta`` is where rows are to be as long as pays."""

Delta = int | Literal["auto"]
"""How many differences a row may have, 0 for none, or ``AUTO``."""

LONGEST = 16
"""Differences of a row, with ``AUTO``: all of them are lost with the one whole version, and in a longer row each would save
at most a 17th more of what a difference saves."""

PAYS = 0.95
"""Of a whole version's bytes, what a difference may take at most: whoever restores it reads both."""

_LONGEST_PAUSE = 16  # whole versions


@dataclass(frozen=True)
class Row:
    """``whole``: the newest whole version. ``offered``: saves begun that may be differences to it. ``stored``: bytes of each that
    has become a version, in their order. ``misses``: rows up to this one, one after another, in which differences did not pay.
    ``pause``: how many whole versions are to come first, after those."""

    whole: Entry
    offered: int = 0
    stored: tuple[int, ...] = ()
    misses: int = 0
    pause: int = 0

    def goes_on(self, delta: Delta) -> tuple[bool, str]:
        """Whether the next version may be a difference to this row's whole one, and why it may or may not.

        With ``AUTO`` a row ends where it is cheapest for each of its versions: when the next difference would take more than the
        mean of the row so far, the whole version included. The next one is taken to grow by as much as the last one did. What
        takes no more than the mean takes no more than the whole version: a restore, which reads that as well, reads twice as much
        at most.
        """
        number = self.offered + 1
        if delta != AUTO:
            return self.offered < delta, f"number {number} of {delta}" if self.offered < delta else f"after {delta} differences"
        if self.pause:
            return False, f"differences did not pay: tried again after {_versions(self.pause)}"
        if self.stored and self.stored[0] > PAYS * self.whole.stored:
            return False, f"a difference took {self.stored[0] / max(1, self.whole.stored):.2f} of the whole version"
        if self.offered >= LONGEST:
            return False, f"after {LONGEST} differences"
        if not self.stored:
            return True, f"number {number}; none is stored yet"
        expected = 2 * self.stored[-1] - self.stored[-2] if self.stored[1:] else self.stored[-1]
        mean = (self.whole.stored + sum(self.stored)) / (1 + len(self.stored))
        told = f"{expected:,} bytes expected, {mean:,.0f} the mean of the row"
        return expected <= mean, f"number {number}; {told}" if expected <= mean else f"after {number - 1} differences; {told}"

    def begins(self, delta: Delta, base: Entry | None) -> bool:
        """Whether a version that is begun now, and might be a difference to ``base``, should be followed by differences to it if
        it comes out whole, and not by one more that is whole."""
        return delta != AUTO or not after(self, self.whole, base).pause

    def begun(self) -> Row:
        """A save was begun that may be a difference to the whole version."""
        return replace(self, offered=self.offered + 1)

    def difference(self, entry: Entry) -> Row:
        """The row after a version that is a difference; to this row's whole one, or to that of the row before."""
        if self.whole.id not in entry.bases:
            return self
        paid = bool(self.stored) or entry.stored <= PAYS * self.whole.stored
        return replace(self, stored=(*self.stored, entry.stored), misses=0 if paid else self.misses + 1)


def after(row: Row | None, entry: Entry, base: Entry | None) -> Row:
    """The row that begins with a whole version. ``row``: the one before. ``base``: what it might have been a difference to; that
    it is none means that nothing paid, or that the base was in nobody's memory."""
    if row is None:
        return Row(entry)
    if row.pause:
        return Row(entry, misses=row.misses, pause=row.pause - 1)
    misses = row.misses + (base == row.whole and not row.stored)
    # The first time this version is enough of a pause; then one more of them, then three, seven, fifteen.
    return Row(entry, misses=misses, pause=min(_LONGEST_PAUSE, 1 << (misses - 1)) - 1 if misses else 0)


def _versions(number: int) -> str:
    return f"{number} more whole version{'s' * (number != 1)}"
