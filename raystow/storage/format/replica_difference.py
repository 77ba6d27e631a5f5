"""What a save has found where ranks that hold the same tensor held other bits, as the version record has it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Damaged
from ..limits import MAX_DIMENSIONS, MAX_INTEGER, MAX_NAME, MAX_NUMBER, MAX_SIDE
from . import records
from .rank_spans import ranks_text

MAJORITY, MINORITY, UNKNOWN, EACH = "majority", "minority", "unknown", "each"
_STORED = (MAJORITY, MINORITY, UNKNOWN, EACH)

TENSOR, BUFFER, VALUE = "tensor", "buffer", "value"
_KINDS = (TENSOR, BUFFER, VALUE)

CAUSES = (
    "causes: data of which each rank has its own (put it below raystow.PerRank), a broadcast that was missed, or a corrupted "
    "device (drain its node)"
)


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor or plain value of which ranks held other bits than others.

    Args:
        name: The tensor, or the plain value.
        kind: "tensor", "value", or "buffer": a tensor of a module such as the statistics of a batch norm, which may differ by
            design.
        odd: The ranks of the minority, ascending; without a majority, those that differ from the rank whose bits are stored. At
            most ``MAX_SIDE`` of ``odd_ranks``.
        others: The other ranks that were compared. At most ``MAX_SIDE`` of ``other_ranks``.
        stored: Whose bits the version has: "majority", "minority", "unknown" (there is no majority), or "each" (plain values:
            each rank's own).
        first: The index of the first element that differs, or of the first of ``within`` elements of which it is one.
        within: 1 if ``first`` is exact; 0 for plain values.
        elements: 1 if one element alone differs; 0 if that is not known.
    """

    name: str
    kind: str
    odd: tuple[int, ...]
    others: tuple[int, ...]
    odd_ranks: int
    other_ranks: int
    stored: str
    first: tuple[int, ...] = ()
    within: int = 0
    elements: int = 0

    @property
    def sides(self) -> str:
        """The ranks of both sides, the minority first."""
        return f"{_side(self.odd, self.odd_ranks)} and {_side(self.others, self.other_ranks)} differ"

    @property
    def place(self) -> str:
        """Where the difference begins; "" for a plain value."""
        if not self.within:
            return ""
        index = f"element {list(self.first)}"
        if self.elements == 1:
            return f"{index} alone"
        return f"from {index} on" if self.within == 1 else f"from one of {self.within:,} elements from {list(self.first)} on"

    @property
    def verdict(self) -> str:
        """Whose bits the version has."""
        return {
            MAJORITY: f"the version has the bits of the majority, {_side(self.others, self.other_ranks)}",
            MINORITY: f"the version has bits of the minority, {_side(self.odd, self.odd_ranks)}",
            UNKNOWN: "without a majority: the version has the bits of the latter",
            EACH: "the version has each rank's own",
        }[self.stored]

    def __str__(self) -> str:
        place = f", {self.place}" if self.place else ""
        return f"{self.sides} in {self.name}{place}; {self.verdict}"


def _side(ranks: tuple[int, ...], count: int) -> str:
    more = f" and {count - len(ranks)} more" if count > len(ranks) else ""
    return f"{ranks_text(ranks)}{more}"


def parse(fields: records.Json, key: str) -> ReplicaDifference:
    """The difference of a record's object. Raises ``Damaged``."""
    ranks = {side: records.integers(fields, side, key, most=MAX_NUMBER) for side in ("odd", "others")}
    optional = ("first", "within", "elements")
    first = records.integers(fields, "first", key, most=MAX_INTEGER) if "first" in fields else ()
    found = records.parse(ReplicaDifference, fields, key, optional=optional, **ranks, first=first)
    long = len(found.name) > MAX_NAME or len(found.first) > MAX_DIMENSIONS or max(map(len, ranks.values())) > MAX_SIDE
    if long or found.stored not in _STORED or found.kind not in _KINDS:
        raise Damaged("an impossible difference of replicas", subject=key)
    return found
