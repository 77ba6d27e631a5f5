"""The compare-and-swap register on a store that loses answers: every update applies once, or its caller knows it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import NotFound, PreconditionFailed, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.format.root import Register, Root
from raystow.storage.object_store import Tagged
from raystow.storage.stores.memory import MemoryStore

FATES = ["works", "lost answer", "412 that was ours", "down", "late", "412"]


class FaultyStore:
    """Conditional puts meet the fates given; when those are used up, all works. ``late``: arrives before the next operation."""

    def __init__(self, fates: list[str]) -> None:
        self.inner = MemoryStore("faulty")
        self.fates: Iterator[str] = iter(fates)
        self.late: list[Callable[[], str]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        return self.inner.get_tagged(key, max_bytes=max_bytes)

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        for write in self.late:
            try:
                write()
            except PreconditionFailed:
                pass
        self.late.clear()
        fate = next(self.fates, "works")
        if fate == "down":
            raise StoreUnavailable("down", subject=key)
        if fate == "late":
            self.late.append(lambda: self.inner.put_if(key, data, tag))
            raise StoreUnavailable("timed out", subject=key)
        if fate == "412":
            raise PreconditionFailed("no", subject=key)
        new = self.inner.put_if(key, data, tag)
        self.meanwhile()
        if fate == "lost answer":
            raise StoreUnavailable("connection reset", subject=key)
        if fate == "412 that was ours":  # a client library that retried by itself
            raise PreconditionFailed("no", subject=key)
        return new


def register(fates: list[str], *, deadline: float = 60.0) -> tuple[Register, FaultyStore, FakeClock]:
    store, clock = FaultyStore([]), FakeClock()
    made = Register(store, clock, repository="cafe", deadline=deadline)  # type: ignore[arg-type]
    made.create(Root("cafe"))
    store.fates = iter(fates)
    return made, store, clock


def pin(name: str) -> Callable[[Root], Root]:
    return lambda root: root if name in root.pins else replace(root, pins={**root.pins, name: 1})


def bump(root: Root) -> Root:
    return replace(root, epoch=root.epoch + 1)


@settings(max_examples=200, deadline=None)
@given(fates=st.lists(st.sampled_from(FATES), max_size=12))
def test_an_update_applies_exactly_once(fates: list[str]) -> None:
    made, store, _ = register(fates)
    for n in range(1, 5):
        assert made.update(bump).epoch == n
        assert made.read().epoch == n
    assert not store.late or made.read().epoch == 4


@pytest.mark.parametrize("fate", ["lost answer", "412 that was ours"])
def test_an_own_write_is_recognised_after_others_have_built_on_it(fate: str) -> None:
    made, store, clock = register([fate])
    other = Register(store.inner, clock, repository="cafe")

    def meanwhile() -> None:
        store.meanwhile = lambda: None
        other.update(pin("theirs"))

    store.meanwhile = meanwhile
    assert made.update(pin("ours")).pins == made.read().pins == {"ours": 1, "theirs": 1}


def test_a_write_that_comes_late_does_not_undo_a_newer_one() -> None:
    made, store, clock = register(["late"])
    made.update(pin("a"))
    store.fates = iter(["late"])
    with ThreadPoolExecutor(1):
        other = Register(store.inner, clock, repository="cafe")
        made.update(pin("b"))
        other.update(pin("c"))
    for write in store.late:
        with pytest.raises(PreconditionFailed):
            write()
    assert set(made.read().pins) == {"a", "b", "c"}


def test_a_change_that_is_there_already_writes_nothing() -> None:
    made, _, clock = register([])
    before = made.read()
    assert made.update(lambda root: root) == before
    assert clock.tokens == 1  # that of the creation


def test_an_update_may_give_up() -> None:
    made, _, _ = register([])

    def refuse(root: Root) -> Root:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made.update(refuse)


def test_concurrent_updates_all_apply() -> None:
    store = MemoryStore("concurrent")
    Register(store, FakeClock(), repository="cafe").create(Root("cafe"))

    def work(worker: int) -> None:
        # Tokens must differ between writers, as random ones do.
        clock = FakeClock()
        clock.tokens = (worker + 1) << 32
        mine = Register(store, clock, repository="cafe")
        for i in range(15):
            mine.update(lambda root, i=i: pin(f"{worker}-{i}")(bump(root)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    root = Register(store, FakeClock(), repository="cafe").read()
    assert (root.epoch, len(root.pins)) == (90, 90)


@pytest.mark.parametrize("deadline", [0.0, 1.0, 60.0])
def test_a_store_that_stays_away_is_given_up_at_the_deadline(deadline: float) -> None:
    made, _, clock = register(["down"] * 10_000, deadline=deadline)
    with pytest.raises(StoreUnavailable, match=r"root\.json"):
        made.update(bump)
    assert clock.time <= deadline
    assert made.read().epoch == 0


def test_an_outage_shorter_than_the_deadline_is_sat_out() -> None:
    made, _, clock = register(["down"] * 8)
    assert made.update(bump).epoch == 1
    assert 0 < clock.time < 60


def test_the_first_of_two_creators_makes_the_root() -> None:
    store, clock = MemoryStore("two"), FakeClock()
    first = Register(store, clock, repository="cafe").create(Root("cafe", next_id=5))
    assert Register(store, clock, repository="cafe").create(Root("cafe")) == first


@pytest.mark.parametrize("fate", ["lost answer", "412 that was ours"])
def test_a_creation_whose_answer_is_lost_is_found(fate: str) -> None:
    store = FaultyStore([fate])
    made = Register(store, FakeClock(), repository="cafe")  # type: ignore[arg-type]
    assert made.create(Root("cafe", next_id=5)) == made.read()
    assert made.read().next_id == 5


def test_a_creation_that_did_not_happen_says_so() -> None:
    made = Register(FaultyStore(["down"]), FakeClock(), repository="cafe")  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable, match=r"root\.json"):
        made.create(Root("cafe"))
    with pytest.raises(NotFound, match=keys.ROOT):
        made.read()
