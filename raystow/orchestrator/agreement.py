"""How a process that restores learns which version: alone, or together with the other ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..storage.bases import Bases
from ..storage.errors import Damaged, NotFound, RaystowError
from ..storage.format import keys
from ..storage.format.root import Entry
from ..storage.log import about
from ..storage.metrics import RESTORED, record
from ..storage.repository import Repository
from ..storage.version import Version
from ..workers.fetching.borrowing import Borrowing, Place
from .restore_plan import Sources, told
from .restoring import Choice, Vote, falling_back, none_left

logger = logging.getLogger(__name__)


class Agreement(Protocol):
    """``settle`` until it answers with what was tried last: that is what all ranks have restored then."""

    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        """The version to restore next, after ``tried`` (None at first) was found to have ``damage`` here (empty: it is restored).
        ``whole``: it is not damaged, but holds less than is asked for.

        None if there is no version at all. ``Damaged`` if there is no other to try.
        """

    @property
    def sources(self) -> Sources:
        """Where the objects of the version last asked for are read from."""

    def version(self, entry: Entry) -> Version:
        """The version to restore, as it is best read from here."""

    def give_up(self, error: str) -> None:
        """This rank cannot restore: tell the others, if they can be told."""


class Alone:
    """The newest version, leased while it is tried; with ``fall_back``, older ones after it.

    A rank of several that cannot talk to the others must not fall back: they might not.
    """

    def __init__(self, repository: Repository, *, fall_back: bool) -> None:
        self._repository, self._fall_back = repository, fall_back
        self.sources = Sources()
        self._lease = contextlib.ExitStack()
        self._beside: Sequence[Entry] = ()

    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        self._lease.close()
        if tried is not None and not damage:
            return tried
        if tried is not None and not self._fall_back:
            remedy = "restore through a Checkpointer, with which all ranks fall back together"
            raise Damaged(damage, subject=f"version {tried.id}", remedy=remedy)
        self._beside = self._repository.root().versions
        older = [entry for entry in self._beside if tried is None or entry.id < tried.id]
        while older:
            entry = older.pop()
            try:
                self._lease.enter_context(self._repository.lease(self._repository.at(entry)))
            except NotFound:
                continue  # dropped a moment ago
            if tried is not None:
                log = about(logger, repository=self._repository.uri, version=tried.id, attempt=tried.attempt, step=tried.step)
                log.error("%s", falling_back(tried, entry, damage, whole=whole))
            return entry
        if tried is None:
            return None
        raise none_left(self._repository.uri, tried, damage, whole=whole)

    def version(self, entry: Entry) -> Version:
        return self._repository.at(entry, beside=self._beside)

    def give_up(self, error: str) -> None:
        self._lease.close()


class Settling(Protocol):
    """The coordinator, as far as restores are concerned."""

    def settle(self, vote: Vote) -> Choice | None:
        """See ``restoring``."""


class Together:
    """The ranks of a run: the coordinator chooses, leases, hears of damage, and tells which nodes have what in memory.

    ``opening`` says who this rank is; ``address`` where its node worker is, on the node with the id ``here``.
    """

    def __init__(
        self, repository: Repository, port: Settling, opening: Vote, address: Callable[[], str], *, here: str = ""
    ) -> None:
        self._repository, self._port, self._address = repository, port, address
        self._opening = replace(opening, node=here)
        self._here, self.sources = here, Sources()
        self._log = about(logger, repository=repository.uri, rank=opening.rank)
        self._choice: Choice | None = None
        self._borrowing: Borrowing | None = None

    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        read = dict(self._borrowing.read) if self._borrowing is not None else {}
        try:  # the node worker lets go of what was read when nobody reads any more: not before all ranks are through
            self._choice = self._port.settle(replace(self._opening, tried=tried, damage=damage, whole=whole, read=read))
        finally:
            self._let_go()
        return None if self._choice is None else self._choice.entry

    def version(self, entry: Entry) -> Version:
        """Read through the node worker, so that what the ranks of a node have in common is read once."""
        assert self._choice is not None
        self.sources = Sources()
        try:
            self._borrowing = Borrowing(self._repository.store, self._address(), self._repository.id)
        except RaystowError as error:
            said = {"version": entry.id, "attempt": entry.attempt, "step": entry.step}
            self._log.warning("restoring past the node worker, from the store: %s", error, extra=said)
            return self._repository.at(entry, beside=[choice.entry for choice in self._choice.needed])
        choices = (self._choice, *self._choice.needed)
        version = self._repository.at(entry, store=self._borrowing)
        needed = {choice.entry.id: self._repository.at(choice.entry, store=self._borrowing) for choice in choices[1:]}
        # Mostly without asking the root.
        version.bases = Bases(version, lambda base: needed.get(base) or version.sibling(base))
        self._borrowing.given = {_record_key(choice.entry): choice.record for choice in choices if choice.record}
        records = {version.record_key: Place(entry.size)}
        self._borrowing.place = records.get  # else once for all ranks of the node
        near = {choice.entry.id: choice.near for choice in choices}
        self.sources = sources = Sources(near.pop(entry.id), self._here, company=self._choice.company, bases=near)
        company, sizes = self._choice.company, {(version.id, version.attempt): _sizes(version)}
        for base in version.bases.all():
            records[base.record_key] = Place(base.entry.size)
            sizes[base.id, base.attempt] = _sizes(base)

        @functools.cache
        def place(key: str) -> Place | None:
            parts, whose = keys.place_of(key), keys.attempt_of(key)
            size = None if parts is None or whose not in sizes else sizes[whose].get(parts)
            if parts is None or whose is None or size is None:
                return None
            peers = sources.peers(parts[0], 0 if whose[0] == version.id else whose[0])
            return Place(size, peers, company.round, company.desk(key))

        self._borrowing.place = place
        return version

    def give_up(self, error: str) -> None:
        self._let_go()
        with contextlib.suppress(RaystowError):
            self._port.settle(replace(self._opening, error=error))

    def _let_go(self) -> None:
        if self._borrowing is not None:
            read = self._borrowing.read
            self._log.info("this rank's restore has read %s", told(read), extra={"bytes_read": dict(read)})
            for source, nbytes in read.items():
                record(RESTORED, nbytes, repository=self._repository.uri, source=source)
            self._borrowing.close()
            self._borrowing = None


def _record_key(entry: Entry) -> str:
    return keys.record(entry.id, entry.attempt)


def _sizes(version: Version) -> dict[Any, int]:
    """Bytes of fragments and packs by what keys are made of: a large version has hundreds of thousands of packs, of which a rank
    reads a few."""
    record = version.record
    return {**record.pack_sizes, **{(info.node,): info.size for info in record.fragments}}
