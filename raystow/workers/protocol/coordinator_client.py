"""The coordinator as node workers call it.

In a cluster ``orchestrator.coordinator.actor`` implements the client; in a test it may be the coordinator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo
from .messages import Begin, EntryInfo, Incarnation, SegmentStored, SegmentTicket, Ticket


class CoordinatorClient(Protocol):
    """Any method may raise ``SaveFailed``: then the attempt is over. Any may be called twice, since an answer can be lost."""

    def begin(self, begin: Begin) -> Ticket:
        """Join the attempt for a step, or open one."""

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        """Report that all shards of a rank are coded; ``covered`` is their part of the coverage sum."""

    def wait_complete(self, ticket: Ticket, warn: Callable[[str], None]) -> None:
        """Return when every rank of the attempt has finished. Meanwhile, ``warn`` gets late ranks."""

    def staged(self, ticket: Ticket, info: FragmentInfo) -> None:
        """Report that the node's packs and fragment are complete, in memory, and being uploaded."""

    def fragment(self, ticket: Ticket, info: FragmentInfo, warn: Callable[[str], None]) -> Entry:
        """Report that the node's packs and fragment are durable; return when the attempt is a version. ``warn``: as above."""

    def failed(self, ticket: Ticket, reason: str) -> None:
        """Give the attempt up: the node cannot store its part."""

    def rank_disconnected(self, rank: int, incarnation: Incarnation, reason: str) -> None:
        """Report that the process of a rank has ended: it begins no more saves."""

    def open_segment(self, newest: EntryInfo) -> SegmentTicket:
        """Ask which entries of a rank, up to its newest one, are to be stored."""

    def segment_stored(self, part: SegmentStored) -> None:
        """Report that entries of a rank are durable."""
