"""A node asks the coordinator for the next segment of a rank until it is due."""

from __future__ import annotations

import threading

from helpers.polling import wait_until

from raystow.storage.stores.memory import MemoryStore
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.journal.segment_writer import SegmentWriter
from raystow.workers.protocol.messages import START, EntryInfo, Generation, OpenJournal, OpenSegment, SegmentTicket


class Busy:
    """A coordinator that waits for the entries of other ranks. ``asked``: how often it was asked for a segment."""

    def __init__(self) -> None:
        self.store, self.asked, self.often = MemoryStore("entries"), 0, threading.Event()

    def ask(self, request: OpenSegment) -> SegmentTicket:
        self.asked += 1
        if self.asked > 5:
            self.often.set()
        return SegmentTicket(0, "", START, START)


def test_the_coordinator_is_asked_again_after_a_while() -> None:
    """Once more at once if there are more entries."""
    busy = Busy()
    opening = OpenJournal("", "", 0, 0, durable_every=1)
    writer = SegmentWriter(EntryStore(0), opening, lambda: (busy.store, busy), pause=30.0)  # type: ignore[arg-type,return-value]
    thread = threading.Thread(target=writer.run)
    thread.start()
    for step in (1, 2):
        writer.kept(EntryInfo("", 0, 1, step, step - 1, (Generation("g", 0),)))
        wait_until(lambda: busy.asked >= step, "the coordinator is asked")  # noqa: B023
    assert not busy.often.wait(0.2)
    writer.close()
    thread.join(10)
    assert not thread.is_alive()
