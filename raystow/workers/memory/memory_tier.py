"""The memory tier: the newest objects of each repository, coded as in the store, in this node's memory.

A hard budget: what does not fit is not kept, and that is said. Copies of what other nodes have made drive nothing out, and make
room for what this node makes. The memory of what was dropped is used again, as far as the budget allows; else it is given back.

Beside a version may lie planes of it that were decoded (``memory.unfolding``): they make room for everything else.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...storage.format import keys
from ...storage.log import about
from ...storage.object_store import Buffer
from .pack_file import Memory, PackFile, Spares

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Home:
    """The attempt that objects belong to, and its repository's id."""

    repository: str
    id: int
    attempt: str


@dataclass(frozen=True)
class Loan:
    """An object's memory, until ``end`` is called: a ``descriptor`` of it, for the caller to close, and the object's bytes."""

    descriptor: int
    nbytes: int
    end: Callable[[], None]


@dataclass
class Part:
    """What is kept of the objects that one node has made. ``objects``: key -> bytes. ``line``: for a copy, the nodes that see to
    it that there are copies of it, each when those before it are gone; empty for what was made here. ``short``: not all fits."""

    objects: dict[str, int] = field(default_factory=dict)
    line: tuple[str, ...] = ()
    short: bool = False


@dataclass
class Holding:
    """What is kept of an attempt. ``parts``: by the number of the node in the attempt that made it. ``committed``: it is a
    version. ``given_up``: it will not be one, but may be restored until there is a newer one. ``base``: the version that it may
    be a difference to. ``planes``: bytes of it that lie here decoded as well."""

    home: Home
    parts: dict[int, Part] = field(default_factory=dict)
    committed: bool = False
    given_up: bool = False
    base: Home | None = None
    planes: int = 0

    @property
    def whole(self) -> set[int]:
        """Numbers of the nodes all of whose objects are here: the fragment, which names the others, is always the last."""
        return {number for number, part in self.parts.items() if not part.short and self.fragment(number) in part.objects}

    def fragment(self, number: int) -> str:
        """The key of the fragment of node ``number``."""
        return keys.fragment(self.home.id, self.home.attempt, number)

    def copy(self) -> Holding:
        """One that stays as it is. Asked for after every object, with the lock held that all who keep one need."""
        parts = {number: replace(part, objects=dict(part.objects)) for number, part in self.parts.items()}
        return replace(self, parts=parts)


class MemoryTier:
    """From any thread. ``budget``: bytes; ``versions``: how many committed versions of a repository are kept."""

    def __init__(self, budget: int, *, versions: int = 1) -> None:
        self._budget, self._versions, self._used = budget, versions, 0
        self._lock = threading.Lock()
        self._holdings: dict[Home, Holding] = {}
        self._writes: dict[str, int] = {}  # repository -> when it was last written to
        self._numbers = itertools.count()
        self._files: dict[tuple[str, str], PackFile] = {}  # by repository and key
        self._planes: dict[Home, PackFile] = {}
        self._spares = Spares()  # within the budget as well

    @property
    def used(self) -> int:
        """Bytes that are kept, or being copied."""
        return self._used

    @property
    def spare(self) -> int:
        """Bytes that were kept, and wait to be used again."""
        with self._lock:
            return self._spares.nbytes

    @property
    def budget(self) -> int:
        """Bytes that may be kept."""
        return self._budget

    def resize(self, budget: int) -> None:
        """Change the budget; the oldest versions go if they do not fit any more."""
        with self._lock:
            self._budget = budget
            self._make_room(0, "")
            self._spares.keep(self._budget - self._used)

    def put(self, home: Home, node: int, key: str, parts: Sequence[Buffer], *, line: tuple[str, ...] = ()) -> memoryview | None:
        """Keep an object that node number ``node`` has made, given in parts; the copy, None if there was no room.

        ``line``: see ``Part``, for what another node has made.
        """
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        with self._lock:
            part = self._holdings.setdefault(home, Holding(home)).parts.setdefault(node, Part())
            part.line = line
            self._writes[home.repository] = next(self._numbers)
            if not line:
                self._make_room(size, home.repository)
            else:
                older = (old for old in self._given_up() if old.repository == home.repository and old.id < home.id)
                self._drop_while_needed(size, older)
                self._drop_planes_while_needed(size)
            if self._used + size > self._budget:
                self._refuse(home, part, size)
                return None
            self._used += size
            memory = self._spares.take(size)
            self._spares.keep(self._budget - self._used)
        file = PackFile(size, memory)
        file.write(views)
        with self._lock:
            here = home in self._holdings and self._holdings[home].parts.get(node) is part
            if not here or (line and part.short):  # given up meanwhile, or a copy that had to make room
                self._used -= size
                file.close()
                return None
            former = self._files.pop((home.repository, key), None)
            if former is not None:  # stored again after a lost answer
                former.close()
                self._used -= former.size
            self._files[home.repository, key] = file
            part.objects[key] = size
            return file.content

    def put_planes(self, home: Home, size: int, write: Callable[[memoryview], None]) -> bool:
        """Keep ``size`` bytes beside a version, which ``write`` fills, for as long as the version is kept and nothing else needs
        the room. False if there is none, or the version is gone. What ``write`` raises is raised here."""
        with self._lock:
            self._drop_while_needed(size, self._superseded(keep=1))
            if home not in self._holdings or home in self._planes or self._used + size > self._budget:
                return False
            self._used += size
            memory = self._spares.take(size)
            self._spares.keep(self._budget - self._used)
        file, kept = PackFile(size, memory), False
        try:
            file.fill(write)
        finally:
            with self._lock:
                if home in self._holdings and file.filled:
                    self._holdings[home].planes, self._planes[home], kept = size, file, True
                else:
                    file.close()
                    self._used -= size
        return kept

    def planes(self, home: Home) -> int:
        """Bytes that lie beside a version."""
        with self._lock:
            return self._planes[home].size if home in self._planes else 0

    def loan_planes(self, home: Home) -> Loan | None:
        """What lies beside a version; None if there is nothing."""
        with self._lock:
            return self._on_loan(self._planes.get(home))

    def lean(self, home: Home, base: Home) -> None:
        """An attempt may be a difference to a version, which stays for as long as the attempt does, if it is here, or comes."""
        with self._lock:
            if base in self._holdings:
                self._holdings.setdefault(home, Holding(home))
            if home in self._holdings:
                self._holdings[home].base = base

    def committed(self, home: Home, *, alone: bool = False) -> None:
        """The attempt is a version: those that it replaces go, and copies that there was no room for may come again. ``alone``:
        it leans on no other after all."""
        with self._lock:
            holding = self._holdings.setdefault(home, Holding(home))
            holding.committed, holding.given_up = True, False
            holding.base = None if alone else holding.base
            holding.parts = {number: part for number, part in holding.parts.items() if not (part.line and part.short)}
            for old in self._superseded():
                self._drop(old)

    def given_up(self, home: Home) -> None:
        """The attempt will never be a version. Parts of which all is here stay, since a part that is whole was staged whole:
        if all of the attempt is alive somewhere, it is the newest state there is. One such attempt of a repository is enough."""
        with self._lock:
            holding = self._holdings.get(home)
            if holding is None or holding.committed:
                return
            for number in holding.parts.keys() - holding.whole:
                self._empty(home, holding.parts.pop(number))
            holding.given_up = True
            same = [old for old in self._given_up() if old.repository == home.repository and self._holdings[old].parts]
            for old in {home, *same} - {*same[-1:]}:
                self._drop(old)

    def holdings(self, repository: str) -> list[Holding]:
        """What is kept of a repository, oldest first."""
        with self._lock:
            found = [held.copy() for held in self._holdings.values() if held.home.repository == repository]
        return sorted(found, key=lambda held: held.home.id)

    def __contains__(self, home: Home) -> bool:
        """Whether anything is kept of an attempt."""
        with self._lock:
            return home in self._holdings

    def repositories(self) -> set[str]:
        """Those of which anything is kept."""
        with self._lock:
            return {home.repository for home in self._holdings}

    def view(self, repository: str, key: str) -> memoryview | None:
        """An object; None if it is not here. Its memory stays as long as the view is held."""
        with self._lock:
            file = self._files.get((repository, key))
            return None if file is None else file.content

    def borrow(self, repository: str, key: str) -> int | None:
        """A descriptor of an object's memory, for the caller to close; None if it is not here."""
        with self._lock:
            file = self._files.get((repository, key))
            return None if file is None else file.lend()

    def loan(self, repository: str, key: str) -> Loan | None:
        """As ``borrow``, by someone who will say when it is over: then the memory of what was dropped may be another object's."""
        with self._lock:
            return self._on_loan(self._files.get((repository, key)))

    def close(self) -> None:
        """Let go of everything. What was lent stays with the borrower."""
        with self._lock:
            for home in list(self._holdings):
                self._drop(home)
            self._spares.keep(0)

    def _on_loan(self, file: PackFile | None) -> Loan | None:
        if file is None:
            return None
        descriptor, memory = file.loan()
        return Loan(descriptor, file.size, functools.partial(self._returned, memory))

    def _returned(self, memory: Memory) -> None:
        with self._lock:
            memory.loans -= 1

    def _refuse(self, home: Home, part: Part, size: int) -> None:
        if part.line:  # whoever sent it tells; what is here of it is of no use
            self._empty(home, part)
        elif not part.short:
            what = "version %d is not kept whole in memory: %d bytes more do not fit into %d, of which %d are taken"
            about(logger, version=home.id, attempt=home.attempt).warning(what, home.id, size, self._budget, self._used)
        part.short = True

    def _make_room(self, size: int, repository: str) -> None:
        """Drop what is replaced, then what was given up, then decoded planes, then what only differences need, then what belongs
        to other repositories, those first that nothing was stored in for longest; at last copies, the oldest first."""
        others = [home for home in self._holdings if home.repository != repository]
        others.sort(key=lambda home: (self._writes[home.repository], home.id))
        self._drop_while_needed(size, (*self._superseded(keep=1), *self._given_up()))
        self._drop_planes_while_needed(size)
        self._drop_bases_while_needed(size)
        self._drop_while_needed(size, others)
        for holding in sorted(self._holdings.values(), key=lambda holding: holding.home.id):
            for part in holding.parts.values():
                if part.line and self._used + size > self._budget:
                    self._refuse(holding.home, part, size)

    def _drop_while_needed(self, size: int, homes: Iterable[Home]) -> None:
        for old in homes:
            if self._used + size > self._budget:
                self._drop(old)

    def _drop_planes_while_needed(self, size: int) -> None:
        for home in sorted(self._planes, key=lambda home: home.id):
            if self._used + size > self._budget:
                what = "GPUs decode planes of version %d from now on, in every save that differs from it: they have to make room"
                about(logger, version=home.id, attempt=home.attempt).warning(what, home.id)
                self._drop_planes(home)

    def _drop_bases_while_needed(self, size: int) -> None:
        """The newest version is worth more here than that later ones are smaller."""
        for home in self._replaced(keep=1):
            if self._used + size > self._budget:
                what = "nothing is stored as a difference to version %d from now on: it has to make room in %.1f MB of memory"
                about(logger, version=home.id, attempt=home.attempt).warning(what, home.id, self._budget / 1e6)
                self._drop(home)

    def _drop_planes(self, home: Home) -> None:
        if (file := self._planes.pop(home, None)) is not None:
            self._spares.give(file)
            self._used -= file.size
            self._holdings[home].planes = 0

    def _given_up(self) -> list[Home]:
        """Attempts that will be no versions, the oldest first."""
        return sorted((home for home, held in self._holdings.items() if held.given_up), key=lambda home: home.id)

    def _superseded(self, keep: int | None = None) -> list[Home]:
        """What was replaced, but for what others lean on."""
        old = self._replaced(keep)
        needed = {held.base for held in self._holdings.values() if held.home not in old}
        return [home for home in old if home not in needed]

    def _replaced(self, keep: int | None = None) -> list[Home]:
        """Committed versions that newer ones have replaced, and older attempts with them; the oldest first."""
        old: list[Home] = []
        for repository in {home.repository for home in self._holdings}:
            ids = sorted(h.home.id for h in self._holdings.values() if h.committed and h.home.repository == repository)
            newest = ids[-(keep or self._versions) :]
            if newest:
                of = (held for held in self._holdings.values() if held.home.repository == repository)
                old += [h.home for h in of if h.home.id < newest[0] or (h.given_up and h.home.id <= newest[-1])]
        return sorted(old, key=lambda home: home.id)

    def _drop(self, home: Home) -> None:
        self._drop_planes(home)
        holding = self._holdings.pop(home, None)
        for part in holding.parts.values() if holding is not None else ():
            self._empty(home, part)

    def _empty(self, home: Home, part: Part) -> None:
        for key, size in part.objects.items():
            self._spares.give(self._files.pop((home.repository, key)))
            self._used -= size
        part.objects.clear()
