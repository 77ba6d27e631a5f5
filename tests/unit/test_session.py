"""A session's conversation with a training process, message by message, with a node that only keeps what it is given."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import SaveFailed
from raystow.storage.format.boxes import Box
from raystow.storage.format.root import Entry
from raystow.workers.ipc.arrival import layout
from raystow.workers.ipc.ring import Ring
from raystow.workers.ipc.wire import Connection, Message
from raystow.workers.memory.former import Former, Lending
from raystow.workers.memory.memory_tier import Home, Loan
from raystow.workers.port import Begin
from raystow.workers.session import Session

SLOTS, SLOT = 3, 1024
HELLO = {
    "uri": "memory://session",
    "repository": "r",
    "rank": 0,
    "world_size": 1,
    "incarnation": "i",
    "pid": 1,
    "slot": SLOT,
    "ring": SLOTS * SLOT,
    "coded": 7,
}
BEGIN = {"save": 5, "step": 9, "timeout": 60, "replicated": 0, "expected": 0, "metrics": {}, "values": []}
ROW = {"path": "[]", "kind": "tensor", "dtype": "uint8", "shape": [4], "offset": [0], "extent": [4], "group": "weights"}
CODING = {"coding": [False, False, ["raw"], [4], 1, None], "streams": b"", "digest": 1}


@dataclass
class Talk:
    """A connection whose other end is a script: it goes on when the session has dealt with the message before."""

    script: Iterator[Message]
    sent: list[Message] = field(default_factory=list)

    def receive(self) -> tuple[Message, None] | None:
        message = next(self.script, None)
        return None if message is None else (message, None)

    def send(self, message: Message, *, fd: int | None = None) -> None:
        self.sent.append(message if fd is None else {**message, "fd": fd})

    def close(self) -> None:
        pass

    @property
    def free(self) -> list[int]:
        return [message["free"] for message in self.sent if "free" in message]


@dataclass
class FakeAttempt:
    """Keeps chunks, by name, until ``done`` of them is called."""

    over: bool = False
    done: dict[str, Callable[[], None]] = field(default_factory=dict)
    bytes: dict[str, bytes] = field(default_factory=dict)
    on_end: Any = None
    ended: list[str] = field(default_factory=list)
    former: Former | None = None
    on_gpu: set[tuple[str, Box]] = field(default_factory=set)
    serves: bool = False

    def join(self, rank: int, values: list[Any], on_end: Any) -> None:
        self.on_end = on_end

    def add(self, rank: int, chunk: Any, raw: np.ndarray, done: Callable[[], None]) -> None:
        self.add_coded(rank, chunk, [raw], done)

    def add_coded(self, rank: int, chunk: Any, parts: list[np.ndarray], done: Callable[[], None]) -> None:
        self.bytes[chunk.name], self.done[chunk.name] = b"".join(map(bytes, parts)), done

    def release(self, name: str) -> None:
        self.done.pop(name)()

    def stalled(self, seconds: float | None) -> None:
        pass

    def rounded(self, found: Any) -> None:
        pass

    def finished(self, rank: int) -> None:
        self.ended.append("finished")

    def fail(self, reason: str) -> None:
        self.ended.append(reason)


@dataclass
class FakeHost:
    attempt: FakeAttempt | SaveFailed
    budget: int = 0
    gone: list[str] = field(default_factory=list)

    def open_attempt(self, uri: str, repository: str, begin: Begin) -> tuple[Any, int]:
        if isinstance(self.attempt, SaveFailed):
            raise self.attempt
        return self.attempt, 0

    def farewell(self, uri: str, rank: int, incarnation: str, reason: str) -> None:
        self.gone.append(reason)

    def grow(self, nbytes: int) -> None:
        self.budget += nbytes

    def keep_in_memory(self, nbytes: int | None) -> None:
        pass

    def store_rate(self, uri: str) -> float:
        return 0.0


def serve(script: Callable[[Talk], Iterator[Message]], attempt: FakeAttempt | SaveFailed) -> tuple[Talk, FakeHost]:
    """Run a session through a script, from its hello to its end."""

    def whole() -> Iterator[Message]:
        try:
            yield from script(talk)
        finally:  # the session waits for what is still needed
            for name in list(attempt.done if isinstance(attempt, FakeAttempt) else ()):
                attempt.release(name)

    talk, host = Talk(iter(())), FakeHost(attempt)
    talk.script = whole()
    Session(cast(Connection, talk), host, "node").serve(HELLO)
    return talk, host


def chunk(name: str, *parts: tuple[int, int, int], coded: bool = False) -> dict[str, Any]:
    return {**ROW, "name": name, "parts": parts} | (CODING if coded else {})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_slot_is_free_exactly_when_it_is_filled_and_needed_no_longer(data: st.DataObject) -> None:
    attempt = FakeAttempt()
    open_slots = set(range(SLOTS))
    needed: dict[str, set[int]] = {}
    expected: list[int] = []

    def settle(candidates: set[int]) -> None:
        free = {slot for slot in candidates if slot not in open_slots and not any(slot in slots for slots in needed.values())}
        expected.extend(sorted(free))
        open_slots.update(free)  # the training process takes it again at once

    def script(talk: Talk) -> Iterator[Message]:
        filled = set[int]()
        yield {"begin": BEGIN}
        for number in range(data.draw(st.integers(0, 40))):
            event = data.draw(st.sampled_from(["chunk", "coded", "filled", "done"]))
            usable = sorted(open_slots - filled)
            if event == "done" and needed:
                name = data.draw(st.sampled_from(sorted(needed)))
                slots = needed.pop(name)
                attempt.release(name)
                settle(slots)
            elif event == "filled" and usable:
                slot = data.draw(st.sampled_from(usable))
                open_slots.remove(slot)
                yield {"filled": slot}
                settle({slot})
            elif event in ("chunk", "coded") and usable:
                count = 1 if event == "chunk" else data.draw(st.integers(0, 3))
                slots = data.draw(st.lists(st.sampled_from(usable), min_size=count, max_size=count))
                needed[f"c{number}"] = set(slots)
                yield {"chunks": [chunk(f"c{number}", *((slot, 64, 4) for slot in slots), coded=event == "coded")]}
            assert sorted(talk.free) == sorted(expected)
        for name in list(needed):
            slots = needed.pop(name)
            attempt.release(name)
            settle(slots)
        for slot in sorted(open_slots):
            open_slots.remove(slot)
            yield {"filled": slot}
            settle({slot})
        assert sorted(talk.free) == sorted(expected)
        yield {"end": 5}

    _, host = serve(script, attempt)
    assert attempt.ended == ["finished"]
    assert host.budget == 0
    assert len(host.gone) == 1


def test_chunks_lie_where_their_parts_say() -> None:
    attempt = FakeAttempt()

    def script(talk: Talk) -> Iterator[Message]:
        memory = session_ring(talk)
        memory[:] = np.arange(memory.size) % 251
        yield {"begin": BEGIN}
        yield {"chunks": [chunk("raw", (1, 64, 4)), chunk("coded", (0, SLOT - 2, 2), (2, 0, 1), (2, 7, 1), coded=True)]}
        assert attempt.bytes["raw"] == bytes(memory[SLOT + 64 : SLOT + 68])
        assert attempt.bytes["coded"] == bytes(memory[[SLOT - 2, SLOT - 1, 2 * SLOT, 2 * SLOT + 7]])
        attempt.release("raw")
        yield {"filled": 2}
        assert talk.free == []
        attempt.release("coded")
        assert talk.free == [2]

    serve(script, attempt)


def session_ring(talk: Talk) -> np.ndarray:
    """The ring's memory, as the training process maps it."""
    answer = next(message for message in talk.sent if "ring" in message)
    return Ring(answer["fd"], answer["ring"], answer["slot"]).memory


def test_what_comes_after_the_failure_of_a_save_costs_no_slot() -> None:
    attempt = FakeAttempt()

    def script(talk: Talk) -> Iterator[Message]:
        yield {"begin": BEGIN}
        yield {"chunks": [chunk("before", (0, 0, 4))]}
        attempt.over = True
        yield {"chunks": [chunk("after", (0, 64, 4), (1, 0, 4), coded=True)]}
        assert list(attempt.done) == ["before"]
        yield {"filled": 1}
        assert talk.free == [1]
        yield {"filled": 0}
        assert talk.free == [1]
        attempt.release("before")
        assert talk.free == [1, 0]

    serve(script, attempt)


def test_a_save_that_cannot_begin_costs_no_slot() -> None:
    def script(talk: Talk) -> Iterator[Message]:
        yield {"begin": BEGIN}
        assert talk.sent[-1] == {"failed": 5, "what": "no", "subject": "s", "remedy": "r"}
        yield {"chunks": [chunk("ignored", (0, 0, 4))]}
        yield {"filled": 0}
        assert talk.free == [0]
        yield {"end": 5}

    serve(script, SaveFailed("no", subject="s", remedy="r"))


@pytest.mark.parametrize("serves", [True, False])
def test_the_outcome_is_told_with_its_warnings_and_whether_the_next_save_may_differ(serves: bool) -> None:
    attempt = FakeAttempt(serves=serves)
    entry = Entry(1, "0123456789abcdef", "00" * 32, 1, 9, 0.5, 4, 4)
    difference = replace(entry, bases=(1,))

    def script(talk: Talk) -> Iterator[Message]:
        yield {"begin": BEGIN}
        attempt.on_end(entry, ("stale",))
        assert talk.sent[-1] == {"done": 5, "entry": vars(entry), "warnings": ["stale"], "serves": serves}
        attempt.on_end(difference, ())
        assert talk.sent[-1]["serves"], "the row goes on, most likely"
        attempt.on_end(SaveFailed("late"), ())
        assert talk.sent[-1] == {"failed": 5, "what": "late", "subject": "", "remedy": ""}

    serve(script, attempt)


@dataclass
class FakeFormer:
    """Of version 3, whose chunks all lie in one pack."""

    home: Home = field(default_factory=lambda: Home("r", 3, "0123456789abcdef"))
    lent: list[set[tuple[str, Box]]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    unfolded: bool = False

    def lend(self, wanted: set[tuple[str, Box]]) -> Lending:
        self.lent.append(set(wanted))
        planes = self._loan("planes", 5) if self.unfolded else None
        return Lending(b"rows", {("weights", 0): self._loan("pack", 9)}, planes, [3 if planes else -1])

    def _loan(self, name: str, nbytes: int) -> Loan:
        return Loan(os.memfd_create(name), nbytes, lambda: self.over.append(name))


def test_what_chunks_may_be_differences_to_is_offered_once_and_named_in_every_save_that_asks() -> None:
    attempt, former = FakeAttempt(), FakeFormer()
    chunk = {**ROW, "name": "w"}
    said = layout([chunk], nbytes=[4], streams=[0], high=[()], starts=[0], bases=[0], batches=[(0, 1, 0)])

    def script(talk: Talk) -> Iterator[Message]:
        yield {"begin": BEGIN}
        yield {"coded": {"device": 0, "layout": said}}
        assert not [message for message in talk.sent if "named" in message], "nobody has asked"
        for save in (6, 7):
            attempt.former = cast(Former, former)
            yield {"begin": {**BEGIN, "save": save, "asks": True}}
            assert talk.sent[-1] == {"save": save, "named": 3}
        attempt.former = None
        yield {"begin": {**BEGIN, "save": 8, "asks": True}}
        assert talk.sent[-1] == {"save": 8, "named": 0}
        (lent,) = [message for message in talk.sent if "lent" in message]
        assert (lent["lent"], lent["nbytes"]) == (("weights", 0), 9)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(lent["fd"])
        assert [message for message in talk.sent if "offer" in message] == [{"offer": 3, "fragment": b"rows", "starts": [-1]}]

    serve(script, attempt)
    assert former.lent == [{("w", ((0,), (4,)))}], "the rows of its own chunks"


def test_a_version_is_offered_again_when_its_planes_were_decoded_and_when_they_had_to_go() -> None:
    attempt, former = FakeAttempt(), FakeFormer()
    attempt.former = cast(Former, former)

    def script(talk: Talk) -> Iterator[Message]:
        for save, unfolded in enumerate([False, True, True, False], 6):
            former.unfolded = unfolded
            yield {"begin": {**BEGIN, "save": save, "asks": True}}
            assert talk.sent[-1] == {"save": save, "named": 3}
        for message in talk.sent:
            if "fd" in message and "ring" not in message:
                with pytest.raises(OSError, match="Bad file"):
                    os.fstat(message["fd"])
        said = [key for message in talk.sent for key in ("lent", "planes", "offer", "named") if key in message]
        once, plain = ["lent", "offer", "named"], ["lent", "planes", "offer", "named"]
        assert said == [*once, *plain, "named", *once]
        assert [message["starts"] for message in talk.sent if "offer" in message] == [[-1], [3], [-1]]
        loans = {message["loan"]: key for message in talk.sent for key in ("lent", "planes") if key in message}
        assert [*loans] == [0, 1, 2, 3]
        yield {"returned": [2, 1]}
        assert former.over == [{"lent": "pack", "planes": "planes"}[loans[number]] for number in (2, 1)]

    serve(script, attempt)
    assert sorted(former.over) == ["pack", "pack", "pack", "planes"], "with the conversation all loans are over"


def test_a_rank_that_asks_says_which_chunks_it_has_coded_itself() -> None:
    said = layout([{**ROW, "name": "w"}], nbytes=[4], streams=[0], high=[()], starts=[0], bases=[0], batches=[(0, 1, 0)])
    for asks in (True, False):
        attempt = FakeAttempt()

        def script(talk: Talk, asks: bool = asks) -> Iterator[Message]:
            yield {"begin": {**BEGIN, "asks": asks}}
            yield {"coded": {"device": 0, "layout": said}}
            yield {"end": 5}

        serve(script, attempt)
        assert attempt.on_gpu == ({("w", ((0,), (4,)))} if asks else set())


def test_a_save_that_cannot_begin_is_told_that_nothing_is_named() -> None:
    def script(talk: Talk) -> Iterator[Message]:
        yield {"begin": {**BEGIN, "asks": True}}
        assert talk.sent[-1] == {"save": 5, "named": 0}

    serve(script, SaveFailed("no"))


def test_memory_is_kept_for_chunks_that_outlive_their_process() -> None:
    attempt = FakeAttempt()
    host = FakeHost(attempt)
    ended = threading.Event()

    def script() -> Iterator[Message]:
        yield {"begin": BEGIN}
        yield {"chunks": [chunk("late", (0, 0, 4), (0, 64, 4), coded=True)]}
        ended.set()

    serving = threading.Thread(target=Session(cast(Connection, Talk(script())), host, "node").serve, args=(HELLO,))
    serving.start()
    assert ended.wait(10)
    serving.join(0.1)
    assert serving.is_alive(), "the ring was closed under a chunk"
    attempt.release("late")
    serving.join(10)
    assert not serving.is_alive()
    assert host.budget == 0
    assert attempt.ended == ["rank 0 (process 1) died while it was staging"]
