"""The record of a segment of the step journal: the entries of all ranks for some consecutive steps, with their digests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..errors import Damaged
from ..limits import MAX_NUMBER
from . import keys, records
from .json_text import shown
from .root import Segment


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. ``previous``: the step whose state it starts from; None for the state without a version. ``tokens`` and
    ``firsts``: the generations that the state comes from, oldest first, each with its first step."""

    step: int
    tokens: tuple[str, ...]
    firsts: tuple[int, ...]
    previous: int | None = None


@dataclass(frozen=True)
class RankEntries:
    """The entries of one rank, concatenated in one object. ``steps``: numbers of rows of the record's ``steps``, ascending.
    ``sizes``: bytes of each entry, ``digests``: its BLAKE3 (hexadecimal)."""

    rank: int
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return sum(self.sizes)

    def places(self) -> list[tuple[int, int]]:
        """Start and size of each entry in the object."""
        return list(zip(itertools.accumulate(self.sizes, initial=0), self.sizes, strict=False))


@dataclass(frozen=True)
class SegmentRecord:
    """The record. ``created``: seconds since 1970. ``steps``: oldest first. ``ranks``: in order, all of them."""

    repository: str
    number: int
    attempt: str
    epoch: int
    created: float
    steps: tuple[RecordedStep, ...]
    ranks: tuple[RankEntries, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def stored(self) -> int:
        """Bytes of all entries."""
        return sum(one.size for one in self.ranks)

    def key(self) -> str:
        """The key of the record."""
        return keys.segment_record(self.number, self.attempt)

    def objects(self) -> dict[str, int]:
        """The sizes of the objects with entries, by key."""
        return {keys.segment_entries(self.number, self.attempt, one.rank): one.size for one in self.ranks}

    def dump(self) -> bytes:
        """The bytes of ``segment.json``."""
        steps = [{name: value for name, value in vars(one).items() if value is not None} for one in self.steps]
        return records.dump({**vars(self), "steps": steps, "ranks": [vars(one) for one in self.ranks]}, self.key())

    @staticmethod
    def load(data: bytes, key: str) -> SegmentRecord:
        """Parse and check a record whose digest was compared with the root's."""
        fields = records.load(data, key)
        steps = tuple(
            records.parse(RecordedStep, step, key, optional=("previous",), firsts=records.integers(step, "firsts", key))
            for step in records.objects(fields, "steps", key)
        )
        ranks = tuple(_rank(one, len(steps), key) for one in records.objects(fields, "ranks", key))
        if not steps or any(a.step >= b.step for a, b in itertools.pairwise(steps)):
            raise Damaged("no ascending steps", subject=key)
        if any(len(one.tokens) != len(one.firsts) or not one.tokens for one in steps):
            raise Damaged("a step without generations", subject=key)
        if [one.rank for one in ranks] != list(range(len(ranks))) or not ranks:
            raise Damaged("not the entries of all ranks", subject=key)
        return records.parse(SegmentRecord, fields, key, steps=steps, ranks=ranks)

    def segment(self, digest: bytes, size: int) -> Segment:
        """The segment's entry in the root, given BLAKE3 and size in bytes of this record."""
        last = self.steps[-1]
        return Segment(
            number=self.number,
            attempt=self.attempt,
            digest=digest.hex(),
            size=size,
            step=last.step,
            generation=last.tokens[-1],
            created=self.created,
            stored=self.stored,
        )


def _rank(fields: records.Json, steps: int, key: str) -> RankEntries:
    steps_of_rank, sizes = (records.integers(fields, name, key) for name in ("steps", "sizes"))
    one = records.parse(RankEntries, fields, key, steps=steps_of_rank, sizes=sizes)
    if not len(one.steps) == len(one.sizes) == len(one.digests) or not all(map(records.DIGEST.fullmatch, one.digests)):
        raise Damaged(f"the entries of rank {one.rank} have not one size and one digest each", subject=key)
    if any(a >= b for a, b in itertools.pairwise((-1, *one.steps, steps))) or one.rank > MAX_NUMBER:
        raise Damaged(f"the entries of rank {shown(one.rank)} are not in the order of steps", subject=key)
    return one
