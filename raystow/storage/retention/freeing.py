"""Which differences are to be written whole, so that a version that is kept for nothing else can go: pure, as ``policy`` is.

A base lives as long as anything needs it. Of a row of differences mostly a few are kept for long, and then their base takes more
bytes than it is worth: to write them whole, and to drop it, leaves less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..chains import line
from ..format.root import Entry


@dataclass(frozen=True)
class Freeing:
    """``base``: a version that is kept only since the ``users`` are differences to it; none if those go themselves. ``frees``:
    bytes that go with it, with what only it needs, and with the users as they are. ``writes``: bytes that the users take by
    themselves, about. ``lacks``: why they stay as they are; empty if they are to be written whole."""

    base: Entry
    users: tuple[Entry, ...]
    frees: int
    writes: int
    lacks: str = ""


def freeings(entries: Sequence[Entry], ruled: set[int], kept: set[int], as_it_is: Mapping[int, str]) -> tuple[Freeing, ...]:
    """One for each base that nothing else keeps, oldest first. ``entries``: those of the root, whose ids ascend. ``ruled``: ids
    of those that something else keeps; ``kept``: of these and of those that they need. ``as_it_is``: those that are not to be
    written again, each with why.

    Users are written whole if that frees more bytes than it writes, and something keeps them for themselves. What they take then
    is guessed by what the whole version takes that they are made of, byte for byte of what it holds: they hold the same tensors.
    """
    found, by_id, goes = list[Freeing](), {entry.id: entry for entry in entries}, set[int]()
    users_of = defaultdict[int, list[Entry]](list)
    for entry in entries:
        for id in entry.bases if entry.id in kept else ():
            users_of[id].append(entry)

    def alone(base: Entry) -> Iterator[Entry]:
        """A base, and those that nothing but it needs."""
        yield base
        for one in (by_id[id] for id in base.bases if id in by_id):
            if one.id not in ruled and users_of[one.id] == [base]:
                yield from alone(one)

    for base in reversed(entries):
        if base.id not in kept or base.id in ruled:
            continue
        users = tuple(user for user in users_of[base.id] if user.id not in goes)
        frees = sum(one.stored for one in (*alone(base), *users))
        writes = sum(estimate(user, line(by_id, base)[-1]) for user in users)
        lacks = next((f"version {user.id} {as_it_is[user.id]}" for user in users if user.id in as_it_is), "")
        lacks = lacks or next((f"version {user.id} is kept for others only" for user in users if user.id not in ruled), "")
        if not lacks and users and writes >= frees:
            lacks = f"to write them whole takes about {writes:,} bytes, and would free {frees:,}"
        if not lacks:
            goes.add(base.id)
        found.append(Freeing(base, users, frees, writes, lacks))
    return tuple(reversed(found))


def as_it_is(entries: Sequence[Entry], verified: int, leased: Collection[tuple[int, str]]) -> dict[int, str]:
    """Ids of the versions that are not to be written whole, each with why: the newest, which a restore may be about to take, the
    one verified last, and those under a lease."""
    reasons = {entry.id: "is being read under a lease" for entry in entries if (entry.id, entry.attempt) in leased}
    return reasons | {verified: "was verified last"} | {entry.id: "is the newest" for entry in entries[-1:]}


def estimate(user: Entry, base: Entry) -> int:
    """About how many stored bytes a difference takes when it is whole. ``base``: the whole version that it is made of."""
    return round(base.stored * user.raw / base.raw) if base.raw else user.stored
