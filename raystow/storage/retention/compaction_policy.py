"""Which deltas are written whole, so that a base that is kept only for them can go. Pure, as ``policy``.

A base lives as long as a version needs it. If few of its deltas are kept for long, writing these whole and dropping the base
takes fewer bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..format.root import Entry
from ..root.delta_chain import base_chain


@dataclass(frozen=True)
class Freeing:
    """A base that is kept only for its ``users``; none if they go themselves. ``frees``: bytes that go with the base, with what
    only it needs, and with the users as they are. ``writes``: bytes of the users as whole versions, estimated. ``lacks``: why the
    users stay as they are; empty if they are written whole."""

    base: Entry
    users: tuple[Entry, ...]
    frees: int
    writes: int
    lacks: str = ""


def freeings(entries: Sequence[Entry], ruled: set[int], kept: set[int], as_it_is: Mapping[int, str]) -> tuple[Freeing, ...]:
    """Judge each base that nothing else keeps, oldest first. Users are written whole if that frees more bytes than it writes, and
    if a rule keeps them. Their size as whole versions is estimated from the version at the end of their chain.

    ``entries``: of the root, ids ascending. ``ruled``: ids that a rule keeps. ``kept``: of these and of their bases.
    ``as_it_is``: ids that are not written again, each with the reason.
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
        writes = sum(estimate(user, base_chain(by_id, base)[-1]) for user in users)
        lacks = next((f"version {user.id} {as_it_is[user.id]}" for user in users if user.id in as_it_is), "")
        lacks = lacks or next((f"version {user.id} is kept for others only" for user in users if user.id not in ruled), "")
        if not lacks and users and writes >= frees:
            lacks = f"to write them whole takes about {writes:,} bytes, and would free {frees:,}"
        if not lacks:
            goes.add(base.id)
        found.append(Freeing(base, users, frees, writes, lacks))
    return tuple(reversed(found))


def as_it_is(
    entries: Sequence[Entry], verified: int, leased: Collection[tuple[int, str]], rolled_back: Collection[int]
) -> dict[int, str]:
    """Ids of the versions that are not written whole, each with the reason: the newest of the live ``entries``, the one verified
    last, those under a lease, and rolled-back ones."""
    reasons = {entry.id: "is being read under a lease" for entry in entries if (entry.id, entry.attempt) in leased}
    reasons |= {verified: "was verified last"} | {entry.id: "is the newest" for entry in entries[-1:]}
    return reasons | dict.fromkeys(rolled_back, "is rolled back")


def estimate(user: Entry, base: Entry) -> int:
    """The stored bytes of a delta as a whole version, estimated. ``base``: the whole version at the end of its chain."""
    return round(base.stored * user.raw / base.raw) if base.raw else user.stored
