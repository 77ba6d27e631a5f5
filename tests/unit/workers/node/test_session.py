"""The messages between a session and a training process, with a fake node that only records what it receives."""

from __future__ import annotations

import itertools
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from helpers.polling import wait_until
from helpers.processes import incarnation
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from raystow.storage.coding.chunk import RAW
from raystow.storage.coding.digest import process_keys
from raystow.storage.errors import SaveFailed
from raystow.storage.format.root import Entry
from raystow.storage.stores.settings import StoreAddress
from raystow.workers.cache.base_version import BaseVersion, KnownChunks
from raystow.workers.cache.tier import AttemptKey, MemoryTier
from raystow.workers.chosen_codec import ChosenCodec
from raystow.workers.node.session import Session
from raystow.workers.packing.attempt import draft
from raystow.workers.packing.chunk_writer import Coded
from raystow.workers.protocol.messages import (
    AttemptJoined,
    BaseDigests,
    BatchBytes,
    Begin,
    BeginSave,
    ChunkDigests,
    ChunkInfo,
    CodedBatches,
    CodedLayout,
    ComparedChunks,
    EndSave,
    OpenSession,
    RankSaveRequest,
    RawChunk,
    SaveContents,
    SaveDone,
    SaveLost,
    SaveStaged,
    SessionOpened,
    SlotsFilled,
    SlotsFree,
    StageCoded,
    StageRaw,
)
from raystow.workers.protocol.unix_channel import Connection
from raystow.workers.shm.ring import Ring
from raystow.workers.shm.slots import Slots

SLOTS, SLOT = 3, 1024
OPENING = OpenSession("memory://session", "r", 0, 1, incarnation("i"), 1, SLOTS * SLOT, SLOT, 7)
BEGIN = BeginSave(RankSaveRequest(0, 1, incarnation("i"), 5, 9, 60.0), SaveContents(0, 0), ())
END = EndSave(5, None, {})
INFO = ChunkInfo("w", "[]", "tensor", "uint8", (4,), "weights", (0,), (4,))
Message = Any


@dataclass
class ScriptedConnection:
    """A connection whose other end is a script. The script continues when the session has processed the previous message."""

    script: Iterator[Message]
    sent: list[Message] = field(default_factory=list)
    descriptor: int | None = None

    def receive(self, *expected: type) -> tuple[Message, None] | None:
        message = next(self.script, None)
        return None if message is None else (message, None)

    def send(self, message: Message, *, fd: int | None = None) -> None:
        self.sent.append(message)
        self.descriptor = fd if self.descriptor is None else self.descriptor

    post = send

    def close(self) -> None:
        pass

    @property
    def free(self) -> list[int]:
        return [slot for message in self.sent if isinstance(message, SlotsFree) for slot in message.slots]


@dataclass
class FakeAttempt:
    """Keeps chunks by name until their ``done`` is called."""

    over: bool = False
    base: Any = None
    id: int = 3
    name: str = "0123456789abcdef"
    trace: str = ""
    noted: list[tuple[str, int]] = field(default_factory=list)
    referred: list[tuple[str, int, int, Any]] = field(default_factory=list)
    done: dict[str, Callable[[], None]] = field(default_factory=dict)
    bytes: dict[str, bytes] = field(default_factory=dict)
    on_end: Any = None
    ended: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)

    def join(self, rank: int, values: list[Any], on_end: Any, on_warning: Any, *, chunks: int, text: int) -> None:
        self.on_end = on_end

    def add(self, rank: int, chunks: list[tuple[Any, np.ndarray]], done: Callable[[], None]) -> None:
        ((chunk, raw),) = chunks
        self.add_coded(rank, [(chunk, [raw.data], done)])

    def add_coded(self, rank: int, chunks: Sequence[Coded]) -> None:
        for chunk, parts, done in chunks:
            self.bytes[chunk.name], self.done[chunk.name] = b"".join(map(bytes, parts)), done

    def add_raw(self, rank: int, chunks: Sequence[Coded]) -> None:
        self.raw += [chunk.name for chunk, _, _ in chunks]
        self.add_coded(rank, chunks)

    def note(self, chunk: Any, second: int) -> None:
        self.noted.append((chunk.name, second))

    def refer(self, rank: int, chunk: Any, second: int, offered: Any) -> None:
        self.referred.append((chunk.name, chunk.raw_digest, second, offered))

    def release(self, name: str) -> None:
        self.done.pop(name)()

    def stalled(self, seconds: float | None) -> None:
        pass

    def compare(self, rank: int, groups: Any, digests: Any) -> None: ...

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
    coding: dict[str, str] = field(default_factory=dict)

    def open_attempt(self, store: StoreAddress, repository: str, begin: Begin) -> tuple[Any, int]:
        self.coding |= begin.contents.coding
        if isinstance(self.attempt, SaveFailed):
            raise self.attempt
        return self.attempt, 0

    def rank_disconnected(self, store: StoreAddress, rank: int, incarnation: object, reason: str) -> None:
        self.gone.append(reason)

    def grow(self, nbytes: int) -> None:
        self.budget += nbytes

    def limit_cache(self, nbytes: int | None) -> None:
        pass

    def make_way(self, slots: Slots, attempt: AttemptKey, nbytes: int) -> None:
        pass

    def replicate(self, repository: str, replicas: int, rate: float | None) -> None:
        pass

    def store_rate(self, store: StoreAddress) -> float:
        return 0.0

    def host_coding(self, store: StoreAddress) -> ChosenCodec:
        return ChosenCodec(RAW, "the store is fast")


def serve(
    script: Callable[[ScriptedConnection], Iterator[Message]], attempt: FakeAttempt | SaveFailed
) -> tuple[ScriptedConnection, FakeHost]:
    """Run a session through a script, from its opening to its end."""

    def whole() -> Iterator[Message]:
        try:
            yield from script(scripted)
        finally:  # the session waits for chunks that are still needed
            for name in list(attempt.done if isinstance(attempt, FakeAttempt) else ()):
                attempt.release(name)

    scripted, host = ScriptedConnection(iter(())), FakeHost(attempt)
    scripted.script = whole()
    Session(cast(Connection, scripted), host, "node", OPENING).serve()
    return scripted, host


def raw(name: str, slot: int, start: int, nbytes: int) -> StageRaw:
    return StageRaw((RawChunk(replace(INFO, name=name), slot, start, nbytes),))


def coded(name: str, *parts: tuple[int, int, int]) -> list[Message]:
    """Return the messages for a chunk on its own device, with all bytes in one run."""
    firsts = itertools.accumulate((nbytes for _, _, nbytes in parts), initial=0)
    spans = tuple((first, *part) for first, part in zip(firsts, parts, strict=False))
    device, size = zlib.crc32(name.encode()), sum(nbytes for _, _, nbytes in parts)
    layout = CodedLayout(device, (replace(INFO, name=name),), (size,), (0,), (0,), (0,), ((0, 1, 0),))
    return [layout, StageCoded(device, (CodedBatches((BatchBytes(0, bytes(8), (spans,)),)),))]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_slot_is_free_once_filled_and_no_longer_needed(data: st.DataObject) -> None:
    attempt = FakeAttempt()
    open_slots = set(range(SLOTS))
    needed: dict[str, set[int]] = {}
    expected: list[int] = []

    def settle(candidates: set[int]) -> None:
        free = {slot for slot in candidates if slot not in open_slots and not any(slot in slots for slots in needed.values())}
        expected.extend(sorted(free))
        open_slots.update(free)  # the training process reuses the slot immediately

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        filled = set[int]()
        yield BEGIN
        for number in range(data.draw(st.integers(0, 40))):
            event = data.draw(st.sampled_from(["chunk", "coded", "filled", "done"]))
            usable = sorted(open_slots - filled)
            if event == "done" and needed:
                name = data.draw(st.sampled_from(sorted(needed)))
                slots = needed.pop(name)
                attempt.release(name)
                settle(slots)
            elif event == "filled" and usable:
                slots = set(data.draw(st.lists(st.sampled_from(usable), min_size=1)))
                open_slots.difference_update(slots)
                yield SlotsFilled(tuple(slots))
                settle(slots)
            elif event in ("chunk", "coded") and usable:
                count = 1 if event == "chunk" else data.draw(st.integers(0, 3))
                slots = data.draw(st.lists(st.sampled_from(usable), min_size=count, max_size=count))
                needed[f"c{number}"] = set(slots)
                parts = [(slot, 64, 4) for slot in slots]
                yield from coded(f"c{number}", *parts) if event == "coded" else [raw(f"c{number}", *parts[0])]
            assert sorted(scripted.free) == sorted(expected)
        for name in list(needed):
            slots = needed.pop(name)
            attempt.release(name)
            settle(slots)
        for slot in sorted(open_slots):
            open_slots.remove(slot)
            yield SlotsFilled((slot,))
            settle({slot})
        assert sorted(scripted.free) == sorted(expected)
        yield END

    _, host = serve(script, attempt)
    assert attempt.ended == ["finished"]
    assert host.budget == 0
    assert len(host.gone) == 1


@pytest.mark.parametrize("may_be_raw", [True, False])
def test_floats_that_may_be_raw_stay_in_the_ring(may_be_raw: bool) -> None:
    """Until they are stored. The reason is passed on; integers, in which coding finds repetitions, are coded."""
    attempt = FakeAttempt()

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        yield replace(BEGIN, raw=may_be_raw)
        for number, kind in enumerate(("float32", "int32")):
            yield StageRaw((RawChunk(replace(INFO, name=kind, dtype=kind), number, 64, 8),))
            yield SlotsFilled((number,))
        assert attempt.raw == ["float32"] * may_be_raw
        assert not scripted.free
        attempt.release("float32")
        assert scripted.free == [0]
        yield END

    _, host = serve(script, attempt)
    assert host.coding == ({RAW: "the store is fast"} if may_be_raw else {})


@pytest.mark.parametrize("began", [True, False])
def test_a_save_is_acknowledged_once_all_of_it_has_come(began: bool) -> None:
    """Before the report to the coordinator, which may take long. A save that cannot begin is never acknowledged."""
    attempt = FakeAttempt()
    reported: list[list[Message]] = []

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        attempt.finished = lambda rank: reported.append(list(scripted.sent))  # type: ignore[method-assign]
        yield BEGIN
        yield raw("w", 0, 0, 4)
        assert SaveStaged(5) not in scripted.sent
        yield END

    scripted, _ = serve(script, attempt if began else SaveFailed("no"))
    assert [message for message in scripted.sent if isinstance(message, SaveStaged)] == [SaveStaged(5)] * began
    assert [SaveStaged(5) in sent for sent in reported] == [True] * began


def test_chunks_are_read_at_the_positions_of_their_parts() -> None:
    attempt = FakeAttempt()

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        memory = session_ring(scripted)
        memory[:] = np.arange(memory.size) % 251
        yield BEGIN
        yield raw("raw", 1, 64, 4)
        yield from coded("coded", (0, SLOT - 2, 2), (2, 0, 1), (2, 7, 1))
        assert attempt.bytes["raw"] == bytes(memory[SLOT + 64 : SLOT + 68])
        assert attempt.bytes["coded"] == bytes(memory[[SLOT - 2, SLOT - 1, 2 * SLOT, 2 * SLOT + 7]])
        attempt.release("raw")
        yield SlotsFilled((2,))
        assert scripted.free == []
        attempt.release("coded")
        assert scripted.free == [2]

    serve(script, attempt)


def session_ring(scripted: ScriptedConnection) -> np.ndarray:
    """Return the memory of the ring, as the training process maps it."""
    opened = scripted.sent[0]
    assert isinstance(opened, SessionOpened)
    assert opened.secret == process_keys().secret, "a training process compares chunks with the same keys"
    assert scripted.descriptor is not None
    return Ring(scripted.descriptor, opened.slots, opened.slot_size).memory


def test_chunks_after_a_failed_save_occupy_no_slot() -> None:
    attempt = FakeAttempt()

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        yield BEGIN
        yield raw("before", 0, 0, 4)
        attempt.over = True
        yield from coded("after", (0, 64, 4), (1, 0, 4))
        assert list(attempt.done) == ["before"]
        yield SlotsFilled((1,))
        assert scripted.free == [1]
        yield SlotsFilled((0,))
        assert scripted.free == [1]
        attempt.release("before")
        assert scripted.free == [1, 0]

    serve(script, attempt)


def test_a_save_that_cannot_begin_occupies_no_slot() -> None:
    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        yield BEGIN
        assert scripted.sent[-1] == SaveLost(5, "no", "s", "r")
        yield raw("ignored", 0, 0, 4)
        yield SlotsFilled((0,))
        assert scripted.free == [0]
        yield END

    serve(script, SaveFailed("no", subject="s", remedy="r"))


def test_a_chunk_in_a_slot_that_does_not_exist_ends_the_session() -> None:
    """The memory of the ring and the share of the budget are freed."""
    attempt = FakeAttempt()
    host, script = FakeHost(attempt), iter([BEGIN, raw("lost", SLOTS, 0, 4)])
    ended = list[BaseException]()

    def run() -> None:
        try:
            Session(cast(Connection, ScriptedConnection(script)), host, "node", OPENING).serve()
        except IndexError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert [str(error) for error in ended] == ["slot 3 of 3"]
    assert (host.budget, len(attempt.ended)) == (0, 1)


def test_the_outcome_is_sent_with_its_warnings() -> None:
    attempt = FakeAttempt()
    entry = Entry(1, "0123456789abcdef", "00" * 32, 1, 9, 0.5, 4, 4)

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        yield BEGIN
        attempt.on_end(entry, ("stale",))
        assert scripted.sent[-1] == SaveDone(5, entry, ("stale",))
        attempt.on_end(SaveFailed("late"), ())
        assert scripted.sent[-1] == SaveLost(5, "late", "", "")

    serve(script, attempt)


def test_digests_are_offered_once_per_base() -> None:
    """References name the version whose digests were offered."""
    attempt, home = FakeAttempt(), AttemptKey("r", 3, "0123456789abcdef")
    infos = [replace(INFO, name=name) for name in "abc"]
    rows = [draft(info, 0, raw_digest=number) for info, number in zip(infos, (7, 8), strict=False)]
    known = KnownChunks(home, {(row.name, row.box): row for row in rows}, {("a", rows[0].box): 70 | 1 << 64})
    base = BaseVersion(cast(MemoryTier, None), known, deltas=False)

    def digests(same: list[int], base: int) -> ChunkDigests:
        numbers, raw, secret = (np.array(some, "<u8").tobytes() for some in ([0, 2], [7, 8], [[70, 80], [1, 2]]))
        return ChunkDigests(0, 4, base, numbers, raw, secret, bytes(same))

    def script(scripted: ScriptedConnection) -> Iterator[Message]:
        yield BEGIN
        yield ComparedChunks(0, 4, tuple(infos))
        yield digests([0, 0], 0)
        assert attempt.noted == [("a", 70 | 1 << 64), ("c", 80 | 2 << 64)]
        attempt.base = base
        for _ in range(2):
            yield BEGIN
        none, offered = [message for message in scripted.sent if isinstance(message, BaseDigests)]
        assert (none.base, offered.base, offered.serial) == (0, 3, 4)
        assert not any(none.secret)
        assert np.frombuffer(offered.secret, "<u8").reshape(2, -1).tolist() == [[70, 0, 0], [1, 0, 0]]
        yield digests([1, 0], 3)
        assert attempt.referred == [("a", 7, 70 | 1 << 64, known)]
        yield digests([1, 0], 2)
        assert attempt.referred[-1] == ("a", 7, 70 | 1 << 64, None), "the attempt reports the wrong base"

    serve(script, attempt)


def test_memory_is_kept_for_chunks_that_outlive_their_process() -> None:
    attempt = FakeAttempt()
    host = FakeHost(attempt)
    ended = threading.Event()

    def script() -> Iterator[Message]:
        yield BEGIN
        yield from coded("late", (0, 0, 4), (0, 64, 4))
        ended.set()

    serving = threading.Thread(target=Session(cast(Connection, ScriptedConnection(script())), host, "node", OPENING).serve)
    serving.start()
    assert ended.wait(10)
    serving.join(0.1)
    assert serving.is_alive(), "the ring was closed under a chunk"
    attempt.release("late")
    serving.join(10)
    assert not serving.is_alive()
    assert host.budget == 0
    assert attempt.ended == ["rank 0 (process 1) died while it was staging"]


def test_a_rank_that_does_not_read_holds_up_no_shared_thread() -> None:
    """More slots become free than messages fit into the socket. The outcomes come after them, in their order."""
    slots, attempt = 2000, FakeAttempt()
    here, there = (Connection(end) for end in socket.socketpair())
    opening = replace(OPENING, ring=slots * SLOT)
    serving = threading.Thread(target=Session(here, FakeHost(attempt), "node", opening).serve, daemon=True)
    serving.start()
    assert there.receive(SessionOpened) is not None
    there.send(BEGIN)
    for slot in range(slots):
        there.send(raw(str(slot), slot, 0, 4))
        there.send(SlotsFilled((slot,)))
    there.send(END)
    wait_until(lambda: attempt.ended == ["finished"], "all is staged")

    def shared() -> None:
        for name in list(attempt.done):
            attempt.release(name)
        for reason in ("first", "second"):
            attempt.on_end(SaveFailed(reason), ())

    thread = threading.Thread(target=shared, daemon=True)
    thread.start()
    thread.join(10)
    held_up = thread.is_alive()
    expected = [AttemptJoined(5, attempt.id, attempt.name), SaveStaged(5), *(SlotsFree((slot,)) for slot in range(slots))]
    expected += [SaveLost(5, reason, "", "") for reason in ("first", "second")]
    received = [there.receive(AttemptJoined, SaveStaged, SlotsFree, SaveLost) for _ in expected]
    assert [one and one[0] for one in received] == expected
    there.close()
    serving.join(10)
    assert not held_up
