"""A compare-and-swap register: one object of a store that several writers replace. It knows nothing of what it contains.

A conditional write is not idempotent: if its answer is lost, a retry loses against the writer's own first write. So each write
carries a fresh write id and is sent once. After any answer but success the writer reads the object and looks for its own ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ..errors import Damaged, InvariantError, NotFound, PreconditionFailed, StoreError, StoreUnavailable, Unsupported
from ..object_store import ObjectStore
from ..runtime.clock import Clock


class Content(Protocol):
    """An immutable value that a register can contain: ``Root``, of which a register knows nothing else."""

    @property
    def write_id(self) -> str:
        """The id of the write that made this value."""

    def stamped(self: T, write_id: str) -> T:
        """The same value with another write id."""

    def dump(self) -> bytes:
        """The bytes to store."""


T = TypeVar("T", bound=Content)


class Register(Generic[T]):
    """Reads and swaps the object at ``key``. ``deadline``: seconds after which an update gives up."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        load: Callable[[bytes], T],
        clock: Clock,
        *,
        max_bytes: int,
        deadline: float = 60.0,
    ) -> None:
        self._store, self._key, self._load, self._clock = store, key, load, clock
        self._max_bytes, self._deadline = max_bytes, deadline

    def read(self) -> T:
        """The value now. Raises ``NotFound`` if there is none."""
        return self._read()[0]

    def _read(self) -> tuple[T, str]:
        tagged = self._store.get_tagged(self._key, max_bytes=self._max_bytes)
        return self._load(tagged.data), tagged.tag

    def create(self, value: T) -> T:
        """Write the first value, or return the one that another writer created first.

        Raises ``InvariantError`` if readers would refuse the value.
        """
        value = value.stamped(self._clock.token())
        data = self._readable(value)
        try:
            self._store.put_if(self._key, data, None)
        except (PreconditionFailed, StoreUnavailable) as error:
            try:
                return self.read()  # this writer's value, if only the answer was lost, or another's
            except NotFound:
                what = f"the object could not be created: {error.what}"
                raise StoreUnavailable(what, subject=self._key, remedy=error.remedy) from None
        return value

    def _readable(self, value: T) -> bytes:
        """The bytes of a value, which a reader must be able to parse. Raises ``InvariantError`` if it would not."""
        data = value.dump()
        try:
            self._load(data)
        except (Damaged, Unsupported) as error:
            raise InvariantError(f"readers would refuse what is to be written: {error.what}", subject=self._key) from error
        return data

    def update(self, change: Callable[[T], T], *, final: tuple[type[StoreError], ...] = ()) -> T:
        """Replace the value by ``change(value)``; the value that contains the change.

        ``change`` may be called several times, each time with a newer value. It must return its argument itself if nothing is
        left to change (an own write had no answer, and others have written since), and may raise to give up. ``StoreUnavailable``
        after the deadline: then the change may or may not have been made. ``InvariantError`` if readers would refuse the value.
        After errors that are ``final`` it does not try again.
        """
        give_up = self._clock.monotonic() + self._deadline
        ours: set[str] = set()
        pause, refused = 0.01, None
        while True:
            try:
                old, tag = self._read()
                if old.write_id in ours:
                    return old
                new = change(old)
                if new is old:
                    return old
                if refused is not None:
                    break
                new = new.stamped(self._clock.token())
                ours.add(new.write_id)
                self._store.put_if(self._key, self._readable(new), tag)
                return new
            except (PreconditionFailed, StoreUnavailable) as error:
                # Lost, or won with a lost answer: reading again tells. A write that is still under way carries the old tag: of
                # it and a retry at most one takes effect, and either is ours.
                if isinstance(error, final):
                    if refused is not None:
                        raise
                    refused = error
                    continue
                if self._clock.monotonic() + pause > give_up:
                    what = f"not swapped within {self._deadline:.0f} s: {error.what}"
                    raise StoreUnavailable(what, subject=self._key, remedy=error.remedy) from error
                self._clock.sleep(pause)
                pause = min(2 * pause, 5.0)
        raise refused
