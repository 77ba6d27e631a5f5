"""What a node worker tells the coordinator, and what it is told: plain data, and the protocol that carries it.

In a cluster the port is an actor handle behind ``orchestrator.coordinator_actor``; in a test it may be the coordinator itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..storage.coding.digest import stored_digest
from ..storage.format.root import Entry
from ..storage.format.version_record import FragmentInfo, PackInfo
from ..storage.retention.policy import Policy

MODULUS = 1 << 64


@dataclass(frozen=True)
class Begin:
    """A rank has begun its ``save``-th save. ``incarnation`` names its process. ``replicated`` is the coverage sum of the tensors
    that every rank must hold alike, ``expected`` that of the tensors that this rank vouches for, ``vouched`` the names of those
    that are DTensors. ``timeout`` is in seconds. ``coding`` and ``lossy``: see ``format.version_record``. ``retention``: what
    to keep once this save is a version. ``delta``: how many versions in a row may be differences to one that is whole; "auto": as
    many as pay."""

    rank: int
    world_size: int
    incarnation: str
    save: int
    node: str
    step: int
    timeout: float
    replicated: int
    expected: int
    metrics: dict[str, Any] = field(default_factory=dict)
    coding: dict[str, str] = field(default_factory=dict)
    retention: Policy | None = None
    vouched: tuple[str, ...] = ()
    lossy: dict[str, str] = field(default_factory=dict)
    delta: int | Literal["auto"] = 0


@dataclass(frozen=True)
class Ticket:
    """The attempt that a save of ``step`` belongs to. ``node`` is the number of the asking node within the attempt; ``timeout``
    the seconds that are left until the coordinator gives the attempt up. ``base``: a whole version that its chunks may be
    differences to, if there is one. ``serves``: if it comes out whole itself, later ones should be differences to it."""

    id: int
    attempt: str
    node: int
    timeout: float
    step: int
    base: Entry | None = None
    serves: bool = False


class Port(Protocol):
    """The coordinator as a node worker sees it. Any call may raise ``SaveFailed``: then the attempt is over. Any call may be made
    twice, since an answer can be lost."""

    def begin(self, begin: Begin) -> Ticket:
        """Join the attempt for a step, or open it."""

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        """All shards of a rank are coded here; ``covered`` is their part of the coverage sum."""

    def wait_complete(self, ticket: Ticket) -> None:
        """Return when every rank of the attempt has finished."""

    def staged(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        """The node's packs and fragment are made, and on their way to the store: what is in memory can be restored from there."""

    def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        """The node's packs and fragment are durable; returns when the attempt is a version."""

    def failed(self, ticket: Ticket, reason: str) -> None:
        """The node cannot do its part: give the attempt up."""

    def gone(self, rank: int, incarnation: str, reason: str) -> None:
        """The process of a rank has ended: what it has not begun to save by now it never will."""


def coverage(name: str, dtype: str, shape: Sequence[int], elements: int) -> int:
    """A term of the coverage sum: what ``elements`` of a tensor weigh, modulo 2**64.

    The terms of all chunks that were stored must add up to those of all tensors that should have been, each with its full
    number of elements. So a tensor that no rank took charge of, or two did, is found without anyone listing them.
    """
    return _weight(name, dtype, tuple(shape)) * elements % MODULUS


@functools.lru_cache(maxsize=1 << 16)
def _weight(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    return int.from_bytes(stored_digest(f"{name}\0{dtype}\0{shape}".encode())[:8], "little") | 1
