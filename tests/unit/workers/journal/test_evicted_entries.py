"""A node drops copies of another training's entries for those of its own: the node that sends the copies learns of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
from helpers.fake_clock import FakeClock

from raystow.storage.coding.digest import stored_digest
from raystow.workers.journal.entry_replicator import EntryReplicator
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node_peers import NodePeers
from raystow.workers.protocol.messages import EntryInfo, EntryKept, Generation, PutEntry

SIZE = 100


def entry(step: int, repository: str, size: int = SIZE) -> EntryInfo:
    return EntryInfo(repository, 0, 1, step, step - 1, (Generation("1", 0),), size, stored_digest(bytes(size)))


class Senders(NodePeers):
    """The nodes that the partner reads copies from, by name."""

    def __init__(self) -> None:
        self.stores: dict[str, EntryStore] = {}

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        content = self.stores[node].named(repository, key)
        if content is not None:
            target[:] = content[start : start + target.nbytes]
        return content is not None


class Sender:
    """A node that records the steps of ``repository``, and sends copies to the partner."""

    def __init__(self, partner: Partner, repository: str) -> None:
        self._partner, self._repository = partner, repository
        self.store = partner.senders.stores[repository] = EntryStore(100 * SIZE)
        self._replicator = EntryReplicator(repository, self.store, self, partner.clock)
        self._replicator.want(repository, 1)

    def nodes(self) -> Mapping[str, str]:
        return {self._repository: "", "partner": ""}

    def put_entry(self, node: str, put: PutEntry) -> EntryKept:
        return self._partner.journal.accept(put)

    def record(self, step: int, size: int = SIZE) -> EntryKept:
        """Record a step; return what has become of its copy."""
        info, answers = entry(step, self._repository, size), list[EntryKept]()
        assert self.store.add(info, bytes(size), own=True) == ""
        self._replicator.submit(info, answers.append)
        for _ in range(100):
            if self._replicator.step() > 0:
                (answer,) = answers
                return answer
        raise AssertionError("the replicator does not become idle")


class Partner:
    """A node with memory for four entries. A training records its steps there, too, in the repository ``mine``."""

    def __init__(self) -> None:
        self.clock, self.senders = FakeClock(), Senders()
        self.journal = NodeJournal("partner", 4 * SIZE, self.senders, self.clock)
        self._recording = contextlib.ExitStack()
        self._recording.enter_context(self.journal.store.recording("mine"))

    def record(self, step: int, size: int = SIZE) -> None:
        assert self.journal.store.add(entry(step, "mine", size), bytes(size), own=True) == ""

    def steps(self, repository: str) -> list[int]:
        return sorted(info.step for info in self.journal.store.holdings(repository))

    def close(self) -> None:
        self._recording.close()
        self.journal.close()


@pytest.fixture
def partner() -> Iterator[Partner]:
    with contextlib.closing(Partner()) as made:
        yield made


def test_copies_that_were_dropped_are_sent_again(partner: Partner) -> None:
    sender = Sender(partner, "other")
    assert [sender.record(step).copies for step in (1, 2, 3)] == [1, 1, 1]
    for step in (1, 2, 3):
        partner.record(step)
    assert partner.steps("other") == [3]
    partner.journal.committed("mine", 3)
    assert sender.record(4) == EntryKept(4, 1)
    assert partner.steps("other") == [1, 2, 3, 4]


def test_an_entry_after_a_dropped_one_has_no_copy(partner: Partner) -> None:
    """The new entry fits, and the dropped one does not any more: a replay from the copies would end before both."""
    sender = Sender(partner, "other")
    assert sender.record(1, 3 * SIZE) == EntryKept(1, 1)
    partner.record(1, 2 * SIZE)
    sender.record(2, SIZE // 2)
    kept = sender.record(3, SIZE // 2)
    assert partner.steps("other") == [2, 3]
    assert kept.copies == 0
    assert "node partner keeps no copy: the memory for entries of recorded steps is full" in kept.problem
    sender.store.save_begun("other", 3, Generation("1", 0))
    assert sender.record(4, SIZE // 2) == EntryKept(4, 1), "the first one is not needed after the save"
    sender.store.save_failed("other", 3)
    assert sender.record(5, SIZE // 2).copies == 0


def test_copies_are_not_dropped_for_other_copies(partner: Partner) -> None:
    """Unless their training has sent none for a while: it has most likely ended."""
    first, second = Sender(partner, "first"), Sender(partner, "second")
    assert [first.record(step).copies for step in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert "is full" in second.record(1).problem
    assert partner.steps("first") == [1, 2, 3, 4]
    partner.clock.time += 3600.0
    assert second.record(2) == EntryKept(2, 1)
    assert partner.steps("second") == [1, 2]
    assert partner.steps("first") == [3, 4]
