"""One restore of all ranks: what each has voted, and which of them the others wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...storage.errors import NotFound, RaystowError
from ...storage.format.parts import is_part
from ...storage.format.root import Entry
from ...storage.runtime.spans import NO_SPAN, Span
from ...workers.protocol.messages import (
    NO_GROUP,
    Incarnation,
    RanksWarning,
    RestoreChoice,
    RestoreGroup,
    RestoreVote,
    UnusedNames,
)
from ..late_ranks import LATE


@dataclass
class RestoreRound:
    """One restore of all ranks. ``version``: the one that the first rank asks for; ``asked``: those of all ranks; ``missing``:
    why there is no such version. ``candidates``: newest first, the first is being tried. ``votes``: the damage that each rank has
    found in it; ``damaged``: whether any has, and not only names that it lacks. ``held``: a candidate that is not a version, but
    complete in memory. ``store_down``: the store did not answer, and cannot take a lease either. ``nodes``: of the ranks.
    ``joined``: whether all ranks have joined; their nodes are the ``group`` then. ``begun``: when the first joined, in monotonic
    seconds. ``read``: bytes by source that each rank has read. ``alike``: whether all ranks restore tensors of the same names;
    else they compare: ``compared`` are the ranks that have reported or used all names of the first candidate, ``unused`` are the
    names that all of these leave unused. ``stalls``: since when ranks have read nothing, and from
    where; ``heard``: when others last reported that they read on; ``progress``: when a rank did more than that. ``warn_at``: when
    to look for late ranks; ``warning``: the last of ``warnings`` about them since the last progress, which one rank logs.
    ``patience``: the longest timeout of any. ``span``: from the first vote on until it is over. ``world_size``: 0 until a rank
    has joined; ``parts``: the numbers of those that ranks declare. They restore other names than ranks, so they compare none."""

    world_size: int
    version: str
    candidates: list[Entry]
    deadline: float
    begun: float
    read: dict[int, Mapping[str, int]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    joined: bool = False
    group: RestoreGroup = NO_GROUP
    members: dict[int, tuple[Incarnation, int]] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)
    missing: NotFound | None = None
    alike: bool = True
    names: dict[int, int] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    unused: bytes | None = None
    votes: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    held: RestoreChoice | None = None
    store_down: bool = False
    lease: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    done: bool = False
    failure: RaystowError | None = None
    stalls: dict[int, tuple[float, str]] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    progress: float = 0.0
    warn_at: float = 0.0
    warnings: int = 0
    patience: float = 0.0
    warning: RanksWarning | None = None
    span: Span = NO_SPAN
    parts: frozenset[int] = frozenset()

    @property
    def everyone(self) -> set[int]:
        """All ranks and parts, as far as they are known."""
        return {*range(self.world_size), *self.parts}

    @property
    def complete(self) -> bool:
        """Whether all ranks and parts have called restore."""
        return self.world_size > 0 and self.everyone <= self.members.keys()

    def warns(self, rank: RestoreVote | UnusedNames) -> bool:
        """Whether a rank that waits has to log the newest warning."""
        return bool(self.waits(rank).text)

    def waits(self, rank: RestoreVote | UnusedNames) -> RanksWarning:
        """The answer to a rank that waits on, with the newest warning if it has to log that."""
        warning = self.warning
        if warning is None or warning.to != rank.rank or warning.number <= rank.last_warning:
            return RanksWarning()
        return warning

    def advance(self, now: float) -> None:
        """Note that a rank has come further. The last warning is out of date."""
        self.progress, self.warning, self.warn_at = now, None, now + LATE

    @property
    def reported(self) -> set[int]:
        """The ranks that wait for the others."""
        comparing = set() if self.has_compared else self.compared
        return {*self.votes, *comparing} if self.joined else {*self.members}

    @property
    def missing_ranks(self) -> set[int]:
        """The ranks that the others wait for."""
        return self.everyone - self.reported

    @property
    def reads(self) -> bool:
        """Whether all ranks have called restore: they have joined, or had with an earlier coordinator."""
        return self.joined or bool(self.votes or self.heard or self.stalls)

    def pauses(self) -> dict[int, tuple[float, str]]:
        """Since when each rank that the others wait for has read nothing, and from where if it has said so."""
        return {rank: self.stalls.get(rank, (max(self.progress, self.heard.get(rank, 0.0)), "")) for rank in self.missing_ranks}

    def answers(self, tried: Entry | None) -> bool:
        """Whether a rank that has ``tried`` this version can be answered. The first answer waits for all ranks, since they share
        reads and must ask for the same version."""
        if self.done or self.failure is not None:
            return True
        if not self.joined and (self.missing or (tried is None and self.candidates)):
            return False
        return tried not in self.candidates[:1]

    @property
    def has_compared(self) -> bool:
        """Whether a rank can be answered that has reported its unused names."""
        return self.unused == b"" or len(self.compared) == self.world_size or self.done or self.failure is not None

    def unused_by_all(self) -> bytes:
        """The bits of the names that all ranks leave unused. Raises if the round has failed, but not after all have reported:
        then all have the same answer."""
        if self.failure is not None and self.unused != b"" and len(self.compared) < self.world_size:
            raise self.failure
        return self.unused or b""

    def uses_all(self, rank: int) -> None:
        """Note that a rank leaves no name unused, or does not compare any more."""
        if rank not in self.compared and not is_part(rank):
            self.unused = b""
            self.compared.add(rank)

    def answer(self, tried: Entry | None) -> Entry | None:
        """The answer for a rank that has ``tried`` this version: the version to restore, or the one that all have restored; None
        if there is none. Raises if the round has failed, but not before the rank has tried the version that all have joined
        for: its own error may say more."""
        if self.failure is not None and not (tried is None and self.joined and self.candidates):
            raise self.failure
        return self.candidates[0] if self.candidates else None
