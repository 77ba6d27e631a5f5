from __future__ import annotations

import errno
import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import stored_digest
from raystow.storage.errors import DeadlineExceeded, SaveFailed
from raystow.storage.limits import MAX_ROWS, MAX_TEXT
from raystow.storage.runtime.memory_budget import MemoryBudget
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.packing import chunk_writer
from raystow.workers.packing import packer as packing
from raystow.workers.packing.attempt import Executors, NodeAttempt, Outcome, draft
from raystow.workers.packing.chunk_writer import ChunkWriter, Coded
from raystow.workers.packing.packer import Packer
from raystow.workers.packing.stale_state import OptimizerWatch
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import (
    Acknowledged,
    AttemptKey,
    AwaitRanks,
    ChunkInfo,
    CoordinatorRequest,
    Message,
    PartFailed,
    PartStored,
    RankFinished,
    Ticket,
)

TICKET = Ticket(1, "0123456789abcdef", 0, 60.0, 1)


class GivenUp(CoordinatorClient):
    """A coordinator that has given up the attempt."""

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        match request:
            case AwaitRanks():
                self.wait_complete()
            case PartFailed(_, reason):
                self.failed(reason)
            case RankFinished():
                self.finished()
        return Acknowledged()

    def finished(self) -> None: ...

    def wait_complete(self) -> None:
        raise SaveFailed("given up")

    def failed(self, reason: str) -> None:
        pass


def test_a_rank_that_joins_too_late_gets_the_error() -> None:
    heard: list[Outcome] = []
    first = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        port: Any = GivenUp()
        shared = Executors(pool, pool, MemoryBudget())
        attempt = NodeAttempt(MemoryStore("late"), port, TICKET, shared, OptimizerWatch("memory://late"))
        attempt.join(0, [], lambda outcome, _: first.set())
        assert first.wait(10)
        attempt.join(1, [], lambda outcome, _: heard.append(outcome))
    assert [str(outcome) for outcome in heard] == ["given up"]


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"chunks": MAX_ROWS // 2}, f"more than {MAX_ROWS:,} chunks and plain values"),
        ({"text": MAX_TEXT // 2 - 3}, "names and plain values of this node's chunks take more than 1024 MiB"),
    ],
)
def test_a_node_with_too_many_rows_fails_when_a_rank_joins(declared: dict[str, int], what: str) -> None:
    failed, told = list[str](), threading.Event()

    class Waiting(GivenUp):
        def wait_complete(self) -> None:
            assert told.wait(10)
            super().wait_complete()

        def failed(self, reason: str) -> None:
            failed.append(reason)
            told.set()

    with ThreadPoolExecutor(1) as pool:
        port: Any = Waiting()
        shared = Executors(pool, pool, MemoryBudget())
        attempt = NodeAttempt(MemoryStore("many"), port, TICKET, shared, OptimizerWatch("memory://many"))
        attempt.join(0, [("step", "[]", "1")], lambda outcome, _: None, **declared)
        assert not failed
        attempt.join(1, [("step", "[]", "1")], lambda outcome, _: None, **declared)  # the ranks share the value's row
        assert len(failed) == 1
    assert what in failed[0]


def test_a_chunk_that_cannot_be_coded_holds_up_no_other() -> None:
    """The others of its slot are coded, and nothing stays acquired for it."""
    failed, freed, budget, staged = list[str](), threading.Event(), MemoryBudget(1 << 20), threading.Event()

    class Waiting(GivenUp):
        def wait_complete(self) -> None:
            assert staged.wait(10)
            super().wait_complete()

        def failed(self, reason: str) -> None:
            failed.append(reason)

        def finished(self) -> None:
            assert freed.is_set()
            staged.set()

    chunks = [draft(ChunkInfo(kind, "[]", "tensor", kind, (8,), "weights", (0,), (8,)), 0) for kind in ("uint8", "odd", "int8")]
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as others:
        port: Any = Waiting()
        shared = Executors(pool, others, budget)
        attempt = NodeAttempt(MemoryStore("odd"), port, TICKET, shared, OptimizerWatch("memory://odd"))
        attempt.add(0, [(chunk, np.zeros(8, np.uint8)) for chunk in chunks], freed.set)
        attempt.finished(0)
        assert staged.wait(10)
        assert attempt.raw == 16
        ended = threading.Event()
        attempt.on_end(lambda outcome, _: ended.set())
        assert ended.wait(10)
    assert budget.used == 0
    assert "'odd' of rank 0" in failed[0]


def test_a_pack_that_cannot_be_sent_holds_up_no_other() -> None:
    """All are released, ``seal`` raises the first error, and ``discard`` does not wait."""
    released: list[str] = []
    errors = [OSError(errno.EMFILE, "injected"), RuntimeError("can't start new thread")]
    raised, heard, store = iter(errors), list[BaseException](), MemoryStore("unsent")

    def keep(key: str, parts: Any, uses: Any) -> None:
        if "other" not in key:
            raise next(raised)

    with ThreadPoolExecutor(1) as pool:
        packer = Packer(store, TICKET, uploads=pool, on_error=heard.append, keep=keep)
        for group in ("model", "optimizer", "other"):
            packer.add([(group, [b"bytes"], functools.partial(released.append, group))])
        packer.flush()
        with pytest.raises(OSError, match="injected"):
            packer.seal()
        discarding = threading.Thread(target=packer.discard, kwargs={"delete": True}, daemon=True)
        discarding.start()
        discarding.join(10)
        assert not discarding.is_alive()
    assert (sorted(released), heard) == (["model", "optimizer", "other"], errors)


def coded(name: str, released: list[str], *, digest: bytes = b"") -> Coded:
    chunk = draft(ChunkInfo(name, "[]", "tensor", "uint8", (5,), "weights", (0,), (5,)), 0, stored_digest=digest)
    return chunk, [memoryview(b"bytes")], functools.partial(released.append, name)


def test_of_chunks_that_come_together_one_may_be_unchanged() -> None:
    """It is a reference, and released at once; the others follow each other in a pack."""
    released, row = list[str](), draft(ChunkInfo("b", "[]", "tensor", "uint8", (5,), "weights", (0,), (5,)), 7)
    known = SimpleNamespace(reference=lambda chunk, second: row if (chunk.name, second) == ("b", 11) else None)
    base: Any = SimpleNamespace(chunks=known)
    with ThreadPoolExecutor(1) as pool:
        packer = Packer(MemoryStore("together"), TICKET, uploads=pool, on_error=lambda error: None)
        writer = ChunkWriter(packer, MemoryBudget(), TICKET, base)
        for name, second in (("a", 10), ("b", 11)):
            writer.note(coded(name, [])[0], second)
        found = writer.append(0, [coded(name, released) for name in "abc"])
        assert [(one.name, one.node, one.pack, one.start) for one in found] == [("a", 0, 0, 0), ("c", 0, 0, 5), ("b", 7, 0, 0)]
        assert released == ["b"]
        assert [pack.size for pack in packer.seal()] == [10]
        packer.finish(10)
    assert sorted(released) == ["a", "b", "c"]
    assert sorted(one.name for one in writer.stored) == ["a", "b", "c"]


def test_a_wrong_digest_releases_all_chunks_that_come_with_it() -> None:
    released = list[str]()
    with ThreadPoolExecutor(1) as pool:
        packer = Packer(MemoryStore("wrong"), TICKET, uploads=pool, on_error=lambda error: None)
        writer = ChunkWriter(packer, MemoryBudget(), TICKET)
        with pytest.raises(SaveFailed, match="b: its bytes in host memory are not those whose digest"):
            writer.append(0, [coded("a", released), coded("b", released, digest=bytes(32)), coded("c", released)])
        assert packer.seal() == []
    assert (released, writer.stored) == (["a", "b", "c"], [])


def test_the_first_digest_of_each_rank_is_checked_and_some_later() -> None:
    """A GPU that computes wrong ones would else be noticed in a restore only, if it is not the first to save."""
    right = stored_digest(memoryview(b"bytes"))
    with ThreadPoolExecutor(1) as pool:
        packer = Packer(MemoryStore("ranks"), TICKET, uploads=pool, on_error=lambda error: None)
        writer = ChunkWriter(packer, MemoryBudget(), TICKET)
        names = [f"a{number}" for number in range(chunk_writer.CHECKED)]
        writer.append(0, [coded(name, [], digest=right) for name in names])
        for rank, name in ((0, "b"), (1, "c")):
            with pytest.raises(SaveFailed, match=f"{name}: its bytes in host memory are not those whose digest"):
                writer.append(rank, [coded(name, [], digest=bytes(32))])
        assert [one.name for one in writer.stored] == names
        packer.discard(delete=True)


def test_chunks_for_which_no_thread_can_be_started_are_released() -> None:
    """The task that was submitted last is in the pool's queue; those after it are not."""
    released, sent, ready = list[str](), list[Any](), threading.Event()

    class Full:
        def submit(self, *task: Any) -> None:
            sent.append(task)
            if len(sent) == 2:
                raise RuntimeError("can't start new thread")

    class Waiting(GivenUp):
        def wait_complete(self) -> None:
            assert ready.wait(10)
            super().wait_complete()

    with ThreadPoolExecutor(1) as pool:
        port, full = cast(Any, Waiting()), cast(Any, Full())
        shared = Executors(pool, full, MemoryBudget())
        attempt = NodeAttempt(MemoryStore("full"), port, TICKET, shared, OptimizerWatch("memory://full"))
        chunks = [replace(coded(name, [])[0], coding=Coding(False, False, ("raw",), (packing.PACK // 2,))) for name in "abcdefg"]
        with pytest.raises(RuntimeError, match="new thread"):
            attempt.add_coded(0, [(chunk, [], functools.partial(released.append, chunk.name)) for chunk in chunks])
        assert released == ["e", "f", "g"]
        ready.set()


def test_uploads_of_a_failed_attempt_hold_up_no_other() -> None:
    """They may hang long after it has failed: until the limits of requests."""
    healed = threading.Event()

    class Hanging(MemoryStore):
        def put(self, key: str, parts: Any) -> None:
            assert second.attempt in key or healed.wait(30)
            super().put(key, parts)

    class Complete(GivenUp):
        def wait_complete(self) -> None:
            assert finished.wait(10)

        def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
            if isinstance(request, PartStored):
                raise SaveFailed("stored, and the coordinator has given up")
            return super().call(request, timeout)

    finished = threading.Event()
    first, second = replace(TICKET, timeout=1.0), replace(TICKET, id=2, attempt="fedcba9876543210")
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()
    expected = {first: packing.NOT_IN_TIME, second: "stored, and the coordinator has given up"}
    with ThreadPoolExecutor(1) as pool:
        port: Any = Complete()
        for ticket, what in expected.items():
            finished.clear()
            watch, shared = OptimizerWatch("memory://outage"), Executors(pool, pool, MemoryBudget())
            attempt = NodeAttempt(Hanging("outage"), port, ticket, shared, watch)
            attempt.join(0, [], lambda outcome, _: outcomes.put(str(outcome)))
            for number in range(40):  # packs: more than there are threads
                chunk = draft(ChunkInfo("w", "[]", "tensor", "uint8", (8,), f"g{number}", (0,), (8,)), 0)
                attempt.add_coded(0, [(chunk, [np.zeros(8, np.uint8)], lambda: None)])
            pool.submit(finished.is_set).result(10)  # the chunks before it are packed
            finished.set()
            assert what in outcomes.get(timeout=10)
        healed.set()


def test_nothing_is_kept_for_an_attempt_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a GPU that are packed late, during the report to the coordinator, would stay until the next version."""
    monkeypatch.setattr(packing, "PACK", 10)
    tier, key, told = MemoryTier(1 << 20), AttemptKey("r", TICKET.id, TICKET.attempt), threading.Event()
    packed, ended = threading.Event(), threading.Event()

    class Slow(GivenUp):
        def failed(self, reason: str) -> None:
            ended.set()
            assert packed.wait(10)
            told.set()

        def wait_complete(self) -> None:
            assert added.wait(10)
            super().wait_complete()

    added = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        port: Any = Slow()
        shared = Executors(pool, pool, MemoryBudget())

        def keep(name: str, parts: Any, uses: Any) -> Any:
            return tier.put(key, 0, name, parts, uses=uses)

        attempt = NodeAttempt(MemoryStore("ended"), port, TICKET, shared, OptimizerWatch("memory://ended"), keep)
        attempt.on_end(lambda outcome, _: tier.given_up(key))
        pool.submit(ended.wait, 10)
        for number in range(3):
            chunk = draft(ChunkInfo("w", "[]", "tensor", "uint8", (24,), "weights", (8 * number,), (8,)), 0)
            attempt.add_coded(0, [(chunk, [np.zeros(8, np.uint8)], lambda: None)])
        pool.submit(packed.set)
        added.set()
        assert told.wait(10)
    assert tier.holdings("r") == []


def test_a_pack_that_is_stored_just_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is durable between the end of the wait and the error about it."""
    stored = threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, parts: Any) -> None:
            assert stored.wait(10)

    def expire(uploads: Any, *how: Any) -> Any:
        outcome = wait(uploads, *how)
        stored.set()
        wait(uploads)
        return outcome

    monkeypatch.setattr(packing, "wait", expire)
    with ThreadPoolExecutor(1) as pool:
        packer = Packer(Slow("slow"), TICKET, uploads=pool, on_error=lambda error: None)
        packer.add([("weights", [b"bytes"], lambda: None)])
        packer.seal()
        with pytest.raises(DeadlineExceeded, match=r"weights-0.*pack: the store has not taken it in time"):
            packer.finish(0.0)
