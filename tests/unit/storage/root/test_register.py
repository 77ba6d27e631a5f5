"""The compare-and-swap register on a store that loses answers: each update applies exactly once, or its caller gets an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from helpers.fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import NotFound, PreconditionFailed, StoreUnavailable
from raystow.storage.object_store import Tagged
from raystow.storage.root.register import Register
from raystow.storage.stores.memory import MemoryStore

FATES = ["works", "lost answer", "412 that was ours", "down", "late", "412"]


KEY = "register"


@dataclass(frozen=True)
class Names:
    """The value of the register in these tests: a counter and some names."""

    count: int = 0
    names: tuple[str, ...] = ()
    write_id: str = ""

    def stamped(self, write_id: str) -> Names:
        return replace(self, write_id=write_id)

    def dump(self) -> bytes:
        return " ".join((str(self.count), self.write_id, *self.names)).encode()


def load(data: bytes) -> Names:
    count, write_id, *names = data.decode().split(" ")
    return Names(int(count), tuple(names), write_id)


def opened(store: object, clock: FakeClock, *, deadline: float = 60.0) -> Register[Names]:
    return Register(store, KEY, load, clock, max_bytes=1 << 20, deadline=deadline)  # type: ignore[arg-type]


class FaultyStore:
    """A store whose conditional puts have the given fates; later puts succeed. A ``late`` put is applied before the next put."""

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
        if fate == "412 that was ours":  # a client library that repeated the request itself
            raise PreconditionFailed("no", subject=key)
        return new


def register(fates: list[str], *, deadline: float = 60.0) -> tuple[Register[Names], FaultyStore, FakeClock]:
    store, clock = FaultyStore([]), FakeClock()
    made = opened(store, clock, deadline=deadline)
    made.create(Names())
    store.fates = iter(fates)
    return made, store, clock


def add(name: str) -> Callable[[Names], Names]:
    return lambda held: held if name in held.names else replace(held, names=(*held.names, name))


def bump(held: Names) -> Names:
    return replace(held, count=held.count + 1)


@settings(max_examples=200, deadline=None)
@given(fates=st.lists(st.sampled_from(FATES), max_size=12))
def test_an_update_applies_exactly_once(fates: list[str]) -> None:
    made, store, _ = register(fates)
    for n in range(1, 5):
        assert made.update(bump).count == n
        assert made.read().count == n
    assert not store.late or made.read().count == 4


@pytest.mark.parametrize("fate", ["lost answer", "412 that was ours"])
def test_an_own_write_is_recognised_after_later_writes(fate: str) -> None:
    made, store, clock = register([fate])
    other = opened(store.inner, clock)

    def meanwhile() -> None:
        store.meanwhile = lambda: None
        other.update(add("theirs"))

    store.meanwhile = meanwhile
    assert made.update(add("ours")).names == made.read().names == ("ours", "theirs")


def test_a_late_write_does_not_undo_a_newer_one() -> None:
    made, store, clock = register(["late"], deadline=0.0)
    with pytest.raises(StoreUnavailable):
        made.update(add("ours"))
    opened(store.inner, clock).update(add("theirs"))
    (write,) = store.late
    with pytest.raises(PreconditionFailed):
        write()
    assert made.read().names == ("theirs",)


def test_an_update_without_a_change_writes_nothing() -> None:
    made, _, clock = register([])
    before = made.read()
    assert made.update(lambda held: held) == before
    assert clock.tokens == 1  # the token of the creation


def test_an_error_of_the_update_function_is_raised() -> None:
    made, _, _ = register([])

    def refuse(held: Names) -> Names:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made.update(refuse)


def test_all_concurrent_updates_are_applied() -> None:
    store = MemoryStore("concurrent")
    opened(store, FakeClock()).create(Names())

    def work(worker: int) -> None:
        # Tokens must differ between writers, like random tokens.
        clock = FakeClock()
        clock.tokens = (worker + 1) << 32
        mine = opened(store, clock)
        for i in range(15):
            mine.update(lambda held, i=i: add(f"{worker}-{i}")(bump(held)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    root = opened(store, FakeClock()).read()
    assert (root.count, len(root.names)) == (90, 90)


@pytest.mark.parametrize("deadline", [0.0, 1.0, 60.0])
def test_a_store_outage_fails_the_update_at_the_deadline(deadline: float) -> None:
    made, _, clock = register(["down"] * 10_000, deadline=deadline)
    with pytest.raises(StoreUnavailable, match=KEY):
        made.update(bump)
    assert clock.time <= deadline
    assert made.read().count == 0


def test_an_update_survives_an_outage_before_the_deadline() -> None:
    made, _, clock = register(["down"] * 8)
    assert made.update(bump).count == 1
    assert 0 < clock.time < 60


def test_the_first_of_two_creators_wins() -> None:
    store, clock = MemoryStore("two"), FakeClock()
    first = opened(store, clock).create(Names(5))
    assert opened(store, clock).create(Names()) == first


@pytest.mark.parametrize("fate", ["lost answer", "412 that was ours"])
def test_a_creation_without_an_answer_is_found(fate: str) -> None:
    store = FaultyStore([fate])
    made = opened(store, FakeClock())
    assert made.create(Names(5)) == made.read()
    assert made.read().count == 5


def test_a_failed_creation_raises_an_error() -> None:
    made = opened(FaultyStore(["down"]), FakeClock())
    with pytest.raises(StoreUnavailable, match=KEY):
        made.create(Names())
    with pytest.raises(NotFound, match=KEY):
        made.read()
