"""The memory tier: the newest objects of each repository, coded as in the store, in this node's memory.

The budget is never exceeded: an object that does not fit is not kept, and a warning is logged. Replicas of other nodes' objects
evict nothing, and are evicted for this node's own objects. Freed memory is reused within the budget, or released.

An object that a GPU has written to a staging ring stays there, without a copy, if the ring's share of the budget allows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...storage.format.keys import attempt_of
from ...storage.log import about
from ...storage.object_store import Buffer
from ..protocol.messages import AttemptKey, Holding, NodePart
from ..shm.slots import Slots, SlotUse
from .lent_memory import LentMemory
from .pack_file import PackFile, Spares
from .ring_pack import RingPack, copied

logger = logging.getLogger(__name__)

_TOGETHER = 4096  # objects that are lent at a time


@dataclass
class KeptPart:
    """A mutable ``NodePart``."""

    objects: dict[str, int] = field(default_factory=dict)
    replica_order: tuple[str, ...] = ()
    incomplete: bool = False


@dataclass
class KeptAttempt:
    """A mutable ``Holding``."""

    attempt: AttemptKey
    parts: dict[int, KeptPart] = field(default_factory=dict)
    committed: bool = False
    given_up: bool = False
    base: AttemptKey | None = None

    def snapshot(self) -> Holding:
        """Return an immutable copy."""
        parts = {n: NodePart(dict(part.objects), part.replica_order, part.incomplete) for n, part in self.parts.items()}
        return Holding(self.attempt, parts, self.committed, self.given_up, self.base)


class MemoryTier:
    """Keeps the newest version of each repository, what it is a delta to, and open saves, in ``budget`` bytes. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self._budget, self._used = budget, 0
        self._lock = threading.Lock()
        self._holdings: dict[AttemptKey, KeptAttempt] = {}
        self._writes: dict[str, int] = {}  # repository -> when it was last written to
        self._numbers = itertools.count()
        self._files: dict[tuple[str, str], PackFile | RingPack] = {}  # by repository and key
        self._rings: Counter[Slots] = Counter()  # with the bytes that are kept in each
        self._leaving: list[RingPack] = []  # to be closed after the lock is released
        self._spares = Spares()  # freed memory; counts towards the budget

    @property
    def used(self) -> int:
        """Bytes that are kept, or being copied."""
        return self._used + self._rings.total()

    @property
    def spare(self) -> int:
        """Bytes of freed memory that can be reused."""
        with self._lock:
            return self._spares.nbytes

    @property
    def budget(self) -> int:
        """Bytes that may be kept."""
        return self._budget

    def resize(self, budget: int) -> None:
        """Change the budget; evict what no longer fits, the oldest versions first."""
        with self._changing():
            self._budget = budget
            self._make_room(0, "")
            self._spares.keep(self._budget - self._taken)

    def admit(self, slots: Slots) -> bool:
        """Reserve ``slots.reserved`` bytes of the budget for objects in a new ring; return False if they are not free."""
        with self._changing():
            for ring in [ring for ring in self._rings if ring.retired and not self._rings[ring]]:
                del self._rings[ring]
            self._spares.keep(self._budget - self._taken - slots.reserved)
            admitted = self._taken + slots.reserved <= self._budget
            if admitted:
                self._rings[slots] = 0
            return admitted

    def make_way(self, slots: Slots, attempt: AttemptKey, nbytes: int) -> None:
        """Let older versions leave a ring that an attempt will fill with up to ``nbytes`` bytes, before it has to wait."""
        self._leave(slots, attempt, nbytes - slots.room)

    def put(
        self,
        attempt: AttemptKey,
        node: int,
        key: str,
        parts: Sequence[Buffer],
        *,
        replica_order: tuple[str, ...] = (),
        uses: Sequence[SlotUse] = (),
    ) -> memoryview | None:
        """Keep an object of node number ``node``, given in parts; return the copy, or None if there is none.

        ``replica_order``: see ``NodePart``; for an object of another node. ``uses``: the parts, if all are in one ring: they stay
        there if the ring may keep them. Older versions leave it for that.
        """
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        pack = RingPack.of(uses)
        while pack is None and uses and self._leave(uses[0].slots, attempt, size):
            pack = RingPack.of(uses)
        with self._changing():
            part = self._holdings.setdefault(attempt, KeptAttempt(attempt)).parts.setdefault(node, KeptPart())
            part.replica_order = replica_order
            self._writes[attempt.repository] = next(self._numbers)
            if pack is not None:
                self._rings[pack.slots] += size
                self._place(attempt.repository, key, pack)
                part.objects[key] = size
                return None
            if not replica_order:
                self._make_room(size, attempt.repository)
            else:
                older = (old for old in self._given_up() if old.repository == attempt.repository and old.id < attempt.id)
                self._drop_while_needed(size, older)
            if not self._fits(size):
                self._refuse(attempt, part, size)
                return None
            self._used += size
            memory = self._spares.take(size)
            self._spares.keep(self._budget - self._taken)
        try:
            file = PackFile(size, memory)
            file.write(views)
        except BaseException:
            with self._lock:
                self._used -= size
            raise
        with self._changing():
            here = attempt in self._holdings and self._holdings[attempt].parts.get(node) is part
            if not here or (replica_order and part.incomplete):  # given up or evicted meanwhile
                self._used -= size
                file.close()
                return None
            self._place(attempt.repository, key, file)
            part.objects[key] = size
            return file.content

    def set_base(self, attempt: AttemptKey, base: AttemptKey) -> None:
        """Keep the version ``base`` as long as ``attempt``, which may be a delta to it. Either may be stored here later."""
        with self._lock:
            if base in self._holdings:
                self._holdings.setdefault(attempt, KeptAttempt(attempt))
            if attempt in self._holdings:
                self._holdings[attempt].base = base

    def committed(self, attempt: AttemptKey, *, alone: bool = False) -> None:
        """Note that an attempt is a version. Versions that it replaces are dropped, and replicas that did not fit may be sent
        again. ``alone``: it is not a delta."""
        with self._changing():
            holding = self._holdings.setdefault(attempt, KeptAttempt(attempt))
            holding.committed, holding.given_up = True, False
            holding.base = None if alone else holding.base
            holding.parts = {
                number: part for number, part in holding.parts.items() if not (part.replica_order and part.incomplete)
            }
            for old in self._superseded():
                self._drop(old)

    def given_up(self, attempt: AttemptKey) -> None:
        """Note that an attempt will never be a version. Its complete parts stay: if all parts of the attempt are complete in the
        memory of some node, it is the newest state there is. Only the newest such attempt of a repository is kept."""
        with self._changing():
            holding = self._holdings.get(attempt)
            if holding is None or holding.committed:
                return
            for number in holding.parts.keys() - holding.snapshot().whole:
                self._empty(attempt, holding.parts.pop(number))
            holding.given_up = True
            same = [old for old in self._given_up() if old.repository == attempt.repository and self._holdings[old].parts]
            for old in {attempt, *same} - {*same[-1:]}:
                self._drop(old)

    def holdings(self, repository: str) -> list[Holding]:
        """Return what is kept of a repository, oldest first."""
        with self._lock:
            found = [held.snapshot() for held in self._holdings.values() if held.attempt.repository == repository]
        return sorted(found, key=lambda held: held.attempt.id)

    def __contains__(self, attempt: AttemptKey) -> bool:
        """Whether anything is kept of an attempt."""
        with self._lock:
            return attempt in self._holdings

    def repositories(self) -> set[str]:
        """The repositories of which anything is kept."""
        with self._lock:
            return {attempt.repository for attempt in self._holdings}

    def view(self, repository: str, key: str) -> memoryview | None:
        """Return an object; None if it is not here. Its memory is valid as long as the view exists: a ring's object is copied."""
        with self._lock:
            file = self._files.get((repository, key))
            if not isinstance(file, RingPack):
                return None if file is None else file.content
            held = file.hold()
        return copied(held, file.size).content

    def lend(self, repository: str, key: str) -> LentMemory | None:
        """Return an object's memory, which the caller closes; None if it is not here. A ring's object is not copied: its slots
        are in use until then."""
        with self._lock:
            file = self._files.get((repository, key))
            if isinstance(file, RingPack):
                return file.lend()
            return None if file is None else LentMemory(file.lend())

    def lend_version(self, repository: str, key: str) -> LentMemory | None:
        """Do as ``lend``, and lend other objects of the version that are in the same ring, so that a reader asks once."""
        with self._lock:
            file = self._files.get((repository, key))
            if not isinstance(file, RingPack):
                return None if file is None else LentMemory(file.lend())
            whose = repository, attempt_of(key)
            same = (
                (name, pack)
                for (of, name), pack in self._files.items()
                if isinstance(pack, RingPack) and pack.slots is file.slots and (of, attempt_of(name)) == whose and name != key
            )
            return file.lend(dict(itertools.islice(same, _TOGETHER)))

    def close(self) -> None:
        """Drop everything. Memory that was lent stays valid for its readers."""
        with self._changing():
            for attempt in list(self._holdings):
                self._drop(attempt)
            self._spares.keep(0)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and free slots after it is released: this sends messages to other processes, which may take a while."""
        try:
            with self._lock:
                yield
        finally:
            with self._lock:
                leaving, self._leaving = self._leaving, []
            for pack in leaving:
                pack.close()

    def _leave(self, slots: Slots, attempt: AttemptKey, size: int) -> bool:
        """Let ``size`` bytes of older attempts leave a ring, of the newest first: others may have the bytes that do not change.
        Returns whether any did."""
        left = size
        with self._changing():
            older = [old for old in self._holdings if old.repository == attempt.repository and old.id < attempt.id]
            for old in sorted(older, key=lambda old: old.id, reverse=True):
                holding = self._holdings[old]
                for part in holding.parts.values() if holding.committed or holding.given_up else ():
                    for key in list(part.objects):
                        file = self._files[attempt.repository, key]
                        if left > 0 and isinstance(file, RingPack) and file.slots is slots:
                            del part.objects[key], self._files[attempt.repository, key]
                            self._remove(file)
                            part.incomplete = True
                            left -= file.size
        return left < size

    @property
    def _taken(self) -> int:
        """Bytes of the budget that are in use or reserved."""
        return self._used + sum(max(kept, ring.reserved) for ring, kept in self._rings.items())

    def _fits(self, size: int) -> bool:
        return self._taken + size <= self._budget

    def _place(self, repository: str, key: str, file: PackFile | RingPack) -> None:
        """Make a file the object. It may replace one: the same, sent again after a lost answer, or one in a ring."""
        if (replaced := self._files.pop((repository, key), None)) is not None:
            self._remove(replaced)
        self._files[repository, key] = file

    def _remove(self, file: PackFile | RingPack) -> None:
        if isinstance(file, RingPack):
            self._rings[file.slots] -= file.size
            self._leaving.append(file)
        else:
            self._used -= file.size
            self._spares.give(file)

    def _refuse(self, attempt: AttemptKey, part: KeptPart, size: int) -> None:
        if part.replica_order:  # the sender reports the outcome; a partial copy is useless
            self._empty(attempt, part)
        elif not part.incomplete:
            what = "version %d is not kept whole in memory: %d bytes more do not fit into %d, of which %d are taken"
            about(logger, version=attempt.id, attempt=attempt.token).warning(what, attempt.id, size, self._budget, self._taken)
        part.incomplete = True

    def _make_room(self, size: int, repository: str) -> None:
        """Evict until ``size`` bytes fit: first replaced versions, then attempts that were given up, then versions that only
        deltas need, then other repositories, the least recently written first, and then replicas, the oldest first."""
        others = [attempt for attempt in self._holdings if attempt.repository != repository]
        others.sort(key=lambda attempt: (self._writes[attempt.repository], attempt.id))
        self._drop_while_needed(size, (*self._superseded(), *self._given_up()))
        self._drop_bases_while_needed(size)
        self._drop_while_needed(size, others)
        for holding in sorted(self._holdings.values(), key=lambda holding: holding.attempt.id):
            for part in holding.parts.values():
                if part.replica_order and not self._fits(size):
                    self._refuse(holding.attempt, part, size)

    def _drop_while_needed(self, size: int, attempts: Iterable[AttemptKey]) -> None:
        for old in attempts:
            if not self._fits(size):
                self._drop(old)

    def _drop_bases_while_needed(self, size: int) -> None:
        """Evict the bases of deltas: later versions get larger, but the newest version stays in memory."""
        for attempt in self._replaced():
            if not self._fits(size):
                what = "nothing is stored as a delta to version %d from now on: it has to make room in %.1f MB of memory"
                about(logger, version=attempt.id, attempt=attempt.token).warning(what, attempt.id, self._budget / 1e6)
                self._drop(attempt)

    def _given_up(self) -> list[AttemptKey]:
        """Attempts that will never be versions, the oldest first."""
        return sorted((attempt for attempt, held in self._holdings.items() if held.given_up), key=lambda attempt: attempt.id)

    def _superseded(self) -> list[AttemptKey]:
        """Replaced versions and older attempts, except those that others are deltas to."""
        old, needed = self._replaced(), set[AttemptKey]()
        for held in self._holdings.values():
            base = held.base if held.attempt not in old else None
            while base is not None and base not in needed:
                needed.add(base)
                base = self._holdings[base].base if base in self._holdings else None
        return [attempt for attempt in old if attempt not in needed]

    def _replaced(self) -> list[AttemptKey]:
        """Committed versions that newer ones have replaced, and older attempts with them; the oldest first."""
        newest: dict[str, int] = {}  # repository -> its newest version
        for held in self._holdings.values():
            if held.committed:
                newest[held.attempt.repository] = max(held.attempt.id, newest.get(held.attempt.repository, 0))
        old = []
        for held in self._holdings.values():
            id, last = held.attempt.id, newest.get(held.attempt.repository, -1)
            if id < last or (held.given_up and id == last):
                old.append(held.attempt)
        return sorted(old, key=lambda attempt: attempt.id)

    def _drop(self, attempt: AttemptKey) -> None:
        holding = self._holdings.pop(attempt, None)
        for part in holding.parts.values() if holding is not None else ():
            self._empty(attempt, part)

    def _empty(self, attempt: AttemptKey, part: KeptPart) -> None:
        for key in part.objects:
            self._remove(self._files.pop((attempt.repository, key)))
        part.objects.clear()
