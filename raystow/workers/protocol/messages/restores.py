"""Restores: between ranks and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from ....storage.format.root import Entry
from ....storage.limits import MAX_RECORD, MAX_ROWS
from ....storage.versions.version_selector import LATEST
from ..codec import Column, CoordinatorRequest, Digest, Message, Table, Text, WorldSize
from .coordinator import COMMIT, Acknowledged
from .incarnation import Incarnation
from .reads import NO_GROUP, RestoreGroup

NameBits = Annotated[bytes, Meta(max_length=MAX_ROWS)]
"""A bit for each of a version's names in sorted order, the lowest bit of each byte first."""


class RestoreChoice(Message, frozen=True):
    """A version to restore. ``near``: number of a node that saved it -> the nodes that have all its objects in memory.
    ``record``: the version's record, where the coordinator still has it. ``group``: the nodes of all ranks. ``bases``: the same
    of the versions that it is a delta to, as far as the coordinator knows them. ``alike``: all ranks restore tensors of the same
    names. ``trace``: of the restore's span."""

    entry: Entry
    near: Table[int, Column[Text]] = {}
    record: Annotated[bytes, Meta(max_length=MAX_RECORD)] = b""
    group: RestoreGroup = NO_GROUP
    bases: Column[RestoreChoice] = ()
    alike: bool = True
    trace: Text = ""

    @property
    def needed(self) -> Iterator[RestoreChoice]:
        """All versions that it cannot be read without, as far as they are known."""
        for base in self.bases:
            yield base
            yield from base.needed

    def has_parts_of(self, other: RestoreChoice) -> bool:
        """Whether all its fields are the very objects of another one: to compare those of thousands of nodes takes longer."""
        return all(getattr(self, name) is getattr(other, name) for name in self.__struct_fields__)

    @staticmethod
    def of(
        entry: Entry,
        known: Sequence[Entry],
        near: Mapping[str, Mapping[int, tuple[str, ...]]],
        record: Callable[[Entry], bytes],
    ) -> RestoreChoice:
        """A version and what it needs. ``known``: the versions of the repository. ``near``: by attempt. ``record``: that of a
        version, empty if it is not here."""
        needs = [base for base in known if base.id in entry.bases and base.id < entry.id]
        bases = tuple(RestoreChoice.of(base, known, near, record) for base in needs)
        return RestoreChoice(entry, near.get(entry.attempt, {}), record(entry), bases=bases)


class RestoreVote(CoordinatorRequest[RestoreChoice | Acknowledged], frozen=True):
    """A rank reports its attempt to restore, and asks which version to restore next; ``Acknowledged``: there is none.

    Args:
        number: Counts the restores of the rank's process.
        tried: The version that the rank has tried; None in the first vote of a restore.
        damage: The damage of that version; empty if it was restored.
        whole: That version is not damaged, but lacks names that the rank restores.
        error: The reason why the rank ends its restore without a version.
        timeout: Seconds for which the rank waits for others that make no progress.
        allow_uncommitted: The rank accepts a save that is not durable yet.
        node: The rank's node, if it has a node worker.
        read: Stored bytes that the rank has read of the version, by source.
        version: The version that the rank asks for, as ``selector_text`` gives it.
        names: A digest of the names of the tensors that the rank restores.
        last_warning: The number of the last warning that the rank has got.
        trace: Of the span in which the rank restores.
        parts: Those that restore together with the ranks; see ``RankSaveRequest``.
        saving: The saves of the process that have not ended: their numbers and steps.
    """

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    number: int
    timeout: float
    tried: Entry | None = None
    damage: Text = ""
    error: Text = ""
    allow_uncommitted: bool = True
    node: Text = ""
    read: Table[Text, int] = {}
    whole: bool = False
    version: Text = LATEST
    names: Digest = 0
    last_warning: int = 0
    trace: Text = ""
    parts: Text = ""
    saving: Column[tuple[int, int]] = ()

    @property
    def wait(self) -> float:
        return self.timeout + COMMIT


class UnusedByAll(Message, frozen=True):
    """The answer to ``UnusedNames``: the names that all ranks leave unused; no bits if one rank has reported none."""

    unused: NameBits


class UnusedNames(CoordinatorRequest[UnusedByAll], frozen=True):
    """The names of ``entry`` that a rank leaves unused and may not, of ``names`` names; no bits if there are none. The other
    fields are those of ``RestoreVote``."""

    rank: int
    world_size: WorldSize
    incarnation: Incarnation
    number: int
    timeout: float
    entry: Entry
    names: int = 0
    unused: NameBits = b""
    last_warning: int = 0

    @property
    def wait(self) -> float:
        return self.timeout + COMMIT


class RankReading(CoordinatorRequest[Acknowledged], frozen=True):
    """A rank reads on, in its restore or replay with this ``number``: the others wait for it for ``timeout`` seconds from now.
    ``quiet``: instead, it has read nothing for so many seconds, from ``source``; they do not wait longer then."""

    rank: int
    incarnation: Incarnation
    number: int
    timeout: float
    quiet: float = 0.0
    source: Text = ""
