"""Saves: between ranks, node workers and the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ....storage.format.root import Entry
from ....storage.format.version_record import FragmentInfo, PackInfo
from ....storage.limits import MAX_ROWS
from ....storage.retention.policy import Policy
from ..codec import Limit, Plain, Unsigned


@dataclass(frozen=True)
class Begin:
    """A rank begins its ``save``-th save. ``incarnation`` identifies its process; the node worker fills in its ``node``.

    Args:
        timeout: Seconds until the save is given up.
        replicated: Coverage sum of the tensors that every rank must hold alike (see ``coordinator_client.coverage``).
        expected: Coverage sum of the tensors of which this rank is the first holder.
        metrics: Plain values.
        coding: See ``format.version_record``, as for ``lossy``.
        retention: The policy to apply once this save is a version.
        owned_dtensors: Names of the DTensors of which this rank is the first holder.
        delta: How many versions in a row may be stored as deltas to a whole one.
    """

    rank: int
    world_size: int
    incarnation: str
    save: int
    node: str
    step: int
    timeout: float
    replicated: Annotated[int, Unsigned()]
    expected: Annotated[int, Unsigned()]
    metrics: Mapping[str, Annotated[object, Plain(), Limit(64 << 20)]] = field(default_factory=dict)
    coding: Mapping[str, str] = field(default_factory=dict)
    retention: Policy | None = None
    owned_dtensors: Annotated[tuple[str, ...], Limit(MAX_ROWS)] = ()
    lossy: Mapping[str, str] = field(default_factory=dict)
    delta: int | Literal["auto"] = 0


@dataclass(frozen=True)
class Ticket:
    """The attempt that a save belongs to.

    Args:
        node: Number of the node in the attempt.
        timeout: Seconds until the coordinator gives the attempt up.
        base: A version that chunks are compared with: unchanged ones refer to it.
        deltas: Whether other chunks may be deltas to it.
    """

    id: int
    attempt: str
    node: int
    timeout: float
    step: int
    base: Entry | None = None
    deltas: bool = False


Packs = Annotated[tuple[PackInfo, ...], Limit(MAX_ROWS)]


@dataclass(frozen=True)
class JoinRun:
    """A process has taken up a rank. ``incarnation`` identifies it."""

    rank: int
    incarnation: str
    world_size: int


@dataclass(frozen=True)
class RankFinished:
    """All shards of a rank are coded; ``covered`` is their part of the coverage sum."""

    ticket: Ticket
    rank: int
    covered: Annotated[int, Unsigned()]


@dataclass(frozen=True)
class AwaitRanks:
    """Asks for an answer when every rank of the attempt has finished."""

    ticket: Ticket


@dataclass(frozen=True)
class PartStaged:
    """A node's packs and fragment are complete, in memory, and being uploaded."""

    ticket: Ticket
    fragment: FragmentInfo
    packs: Packs


@dataclass(frozen=True)
class PartStored:
    """A node's packs and fragment are durable. The answer, when the attempt is a version, is ``Committed``."""

    ticket: Ticket
    fragment: FragmentInfo
    packs: Packs


@dataclass(frozen=True)
class PartFailed:
    """A node cannot store its part of an attempt."""

    ticket: Ticket
    reason: str


@dataclass(frozen=True)
class RankSaveFailed:
    """The training process of a rank has lost its ``save``-th save."""

    rank: int
    incarnation: str
    save: int
    step: int
    reason: str


@dataclass(frozen=True)
class RankDisconnected:
    """The process of a rank has ended."""

    rank: int
    incarnation: str
    reason: str


@dataclass(frozen=True)
class Committed:
    """The entry of the version that an attempt has become."""

    entry: Entry


@dataclass(frozen=True)
class Acknowledged:
    """The answer to a request that asks for nothing."""
