"""The invariants of the root: pure functions that yield what is wrong. ``RootRegister`` checks all of them before every swap.

``docs/spec/format-v1.md`` lists them with the same numbers and names. ``OF_SWAP``, ``OF_ROLLBACK`` and
``OF_SEGMENTS`` compare a root with the one that replaces it. ``OF_ROOT`` judges one root; what was broken before the swap does
not refuse it, so that a damaged repository can be mended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ..errors import Fenced, InvariantError
from ..format import keys
from ..format.root import Dropped, Entry, Rewrite, Root
from ..limits import MAX_CHAIN, MAX_SEGMENTS
from .delta_chain import depths
from .history import predecessors, remaining


@dataclass(frozen=True)
class Fence:
    """The epoch under which a coordinator writes, and its name."""

    epoch: int
    owner: str


@dataclass(frozen=True)
class Claims:
    """What a swap relies on beyond the two roots.

    ``fence``: the writer's epoch. ``released``: names of pins that may go together with their versions. ``read``: the entries
    that a new attempt was made from. ``rollbacks``: how many there were when the attempt began that is committed.
    """

    fence: Fence | None = None
    released: frozenset[str] = frozenset()
    read: frozenset[Entry] = frozenset()
    rollbacks: int | None = None


def check(old: Root | None, new: Root, claims: Claims = Claims()) -> None:  # immutable
    """Refuse a swap of ``old`` (None: there is no root that can be read) by ``new``: ``Fenced`` if a newer coordinator is in
    charge, else ``InvariantError``, whose message begins with number and name of the invariant."""
    later = (*OF_ROLLBACK, *OF_SEGMENTS)
    for name, rule in (*_named(OF_SWAP, 1), *_named(later, 1 + len(OF_SWAP) + len(OF_ROOT))):
        if old is not None:
            _refuse(name, rule(old, new, claims))
    for name, judge in _named(OF_ROOT, 1 + len(OF_SWAP)):
        known = set(judge(old)) if old is not None else set()
        _refuse(name, (broken for broken in judge(new) if broken not in known))


def names() -> list[str]:
    """Number and name of each invariant."""
    rules: tuple[Callable[..., object], ...] = (*OF_SWAP, *OF_ROOT, *OF_ROLLBACK, *OF_SEGMENTS)
    return [name for name, _ in _named(rules, 1)]


def writer_in_charge(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A swap under an epoch finds this epoch and its owner. A repair may repeat an epoch, never an owner."""
    fence = claims.fence
    if fence is not None and (old.epoch, old.owner) != (fence.epoch, fence.owner):
        done = "was put back instead of" if old.epoch < fence.epoch else "has replaced"
        what = f"epoch {old.epoch} of {old.owner!r} {done} epoch {fence.epoch}"
        raise Fenced(what, subject=keys.ROOT, remedy="let the newer coordinator work, or stop it first")
    yield from ()


def epoch_rises(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """The epoch rises by one when the owner changes, and only then. The repository stays."""
    if new.repository != old.repository:
        yield f"the repository becomes {new.repository!r}"
    if new.epoch != old.epoch + (new.owner != old.owner):
        yield f"epoch {old.epoch} of {old.owner!r} becomes {new.epoch} of {new.owner!r}"


def next_id_grows(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """``next_id`` never falls, so no id is used again."""
    if new.next_id < old.next_id:
        yield f"next_id falls from {old.next_id} to {new.next_id}"


def one_commit(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """At most one version is added, as the last, with an id that was free; nothing else changes in the lists with it."""
    known = {entry.id for entry in old.listed}
    for entry in new.versions:
        if entry.id in known:
            continue
        if entry.id < old.next_id:
            yield f"id {entry.id} is spent: the next version is {old.next_id}"
        elif (new.versions, new.rolled_back) != ((*old.versions, entry), old.rolled_back) or new.next_id != entry.id + 1:
            yield f"version {entry.id} is added together with another change"


def removals_noted(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """An attempt that is not listed any more is noted in ``dropped``, and nothing else is."""
    gone = _attempts(old.listed) - _attempts(new.listed)
    noted = _attempts(new.dropped) - _attempts(old.dropped)
    for id, attempt in sorted(gone ^ noted):
        yield f"attempt {attempt} of version {id} is {'noted but not removed' if (id, attempt) in noted else 'removed unnoted'}"


def newest_stays(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """The last version is neither removed nor replaced: a writer without an answer looks for its version there."""
    if old.versions and old.versions[-1] not in new.listed:
        yield f"version {old.versions[-1].id} is the newest"


def verified_stays(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """The version that was verified last is neither removed nor replaced."""
    if any(entry.id == old.verified and entry not in new.listed for entry in old.versions):
        yield f"version {old.verified} was verified last"


def pinned_stays(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A pinned version is not removed, unless its pins are released, and is replaced only by all of it, written whole."""
    pinned = {id: name for name, id in old.pins.items() if name not in claims.released}
    after = {entry.id: entry for entry in new.listed}
    for entry in old.listed:
        now = after.get(entry.id)
        if entry.id in pinned and now != entry and (now is None or now.groups != entry.groups or now.bases):
            yield f"version {entry.id} is pinned as {pinned[entry.id]}"


def replacements_noted(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """At most one version is replaced, by an attempt that was noted, made from attempts that are still live. The note goes."""
    for entry in claims.read - set(old.versions):
        yield f"attempt {entry.attempt} of version {entry.id}, which was read, is not live"
    replaced = [after for _, after in _replaced(old, new)]
    if len(replaced) > 1:
        yield f"{len(replaced)} versions are replaced at once"
    for id, attempt in sorted(_attempts(replaced)):
        if (id, attempt) not in _attempts(old.rewrites) - _attempts(new.rewrites):
            yield f"attempt {attempt} of version {id} was not noted, or stays noted"


def replacement_is_same(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A replacement is the same saved version: its step and time, its first attempt, and of a thinned one no other groups."""
    for before, after in _replaced(old, new):
        same = (before.step, before.created, before.origin) == (after.step, after.created, after.saved)
        if not same or (before.groups and before.groups != after.groups):
            yield f"version {before.id} becomes another"


def notes_on_old_versions(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """An attempt is noted in ``rewrites`` for a live version that is not the newest."""
    for id, attempt in sorted(_attempts(new.rewrites) - _attempts(old.rewrites)):
        if id not in {entry.id for entry in old.versions[:-1]}:
            yield f"attempt {attempt} is noted for version {id}"


def ids_ascend(root: Root) -> Iterator[str]:
    """Ids ascend strictly from 1 on, also of live and rolled-back versions together, and ``next_id`` is above them."""
    for entries in (root.versions, root.listed):
        ids = [0, *(entry.id for entry in entries)]
        yield from (f"version {b} follows version {a}" for a, b in itertools.pairwise(ids) if a >= b)
    if ids[-1] >= root.next_id:
        yield f"version {ids[-1]} is not below next_id"


def attempts_once(root: Root) -> Iterator[str]:
    """An attempt is listed, dropped or noted: one of them, once."""
    attempts = sorted((one.id, one.attempt) for all in (root.listed, root.dropped, root.rewrites) for one in all)
    yield from (f"attempt {b[1]} of version {b[0]} is there twice" for a, b in itertools.pairwise(attempts) if a == b)


def bases_live(root: Root) -> Iterator[str]:
    """Each base of a live version is live, that of a rolled-back one is listed; and each is lower."""
    live, listed = {entry.id for entry in root.versions}, {entry.id for entry in root.listed}
    for entry, base in _bases(root):
        if base not in (live if entry.id in live else listed) or base >= entry.id:
            yield f"version {entry.id} is a delta to version {base}, which is not there"


def bases_complete(root: Root) -> Iterator[str]:
    """A version that is not thinned has no thinned base: it needs all of it."""
    thinned = {entry.id for entry in root.listed if not entry.resumable}
    for entry, base in _bases(root):
        if entry.resumable and base in thinned:
            yield f"version {entry.id} is a delta to version {base}, which is thinned"


def chains_bounded(root: Root) -> Iterator[str]:
    """No chain of deltas is longer than the limit ``chain``."""
    for id, depth in depths(root.listed).items():
        if depth > MAX_CHAIN:
            yield f"version {id} is read through {depth} versions"


def names_live(root: Root) -> Iterator[str]:
    """Pins name listed versions, ``verified`` a live one or 0."""
    listed = {entry.id for entry in root.listed}
    yield from (f"pin {name!r} names version {id}" for name, id in root.pins.items() if id not in listed)
    if root.verified not in {0, *(entry.id for entry in root.versions)}:
        yield f"verified names version {root.verified}"


def commit_after_rollback(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A version or segment is added only if its attempt began after the last rollback."""
    if claims.rollbacks is not None and claims.rollbacks < old.rollbacks:
        yield "the repository was rolled back since the save began"


def only_rollbacks_move(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A version becomes live or rolled back only if ``rollbacks`` rises by one, and then nothing is removed or replaced, and a
    version stays live. Nothing else changes ``rollbacks``."""
    moved = {e.id for e in old.versions} & {one.entry.id for one in new.rolled_back}
    moved |= {one.entry.id for one in old.rolled_back} & {e.id for e in new.versions}
    if new.rollbacks == old.rollbacks:
        yield from (f"version {id} is moved without a rollback" for id in sorted(moved))
    elif new.rollbacks != old.rollbacks + 1 or new.listed != old.listed or not new.versions:
        yield f"rollback {new.rollbacks} follows {old.rollbacks} with another change"


def history_stays(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A version follows the one that it followed; if that is removed, the one before that in its history."""
    before, after = predecessors(old), predecessors(new)
    gone = before.keys() - after.keys()
    for id in before.keys() & after.keys():
        if after[id] != remaining(before, before[id], gone):
            yield f"version {id} follows version {after[id]}, not version {before[id]}"


def one_segment(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """At most one segment is added, as the last, with a number that was free, and no version with it. No number is used again."""
    after = set(new.segments)
    added = new.segments[-1:] if after - set(old.segments) else ()
    if new.next_segment < old.next_segment or any(one.number < old.next_segment for one in added):
        yield f"a number of a segment below {old.next_segment} is used again"
    kept = tuple(one for one in old.segments if one in after)
    if new.segments != (*kept, *added) or any(new.next_segment != one.number + 1 for one in added):
        yield "a segment is added out of order"
    if added and (kept != old.segments or new.listed != old.listed):
        yield f"segment {added[0].number} is added together with another change"
    if len(new.segments) > MAX_SEGMENTS:
        yield f"there are {len(new.segments)} segments"


def segments_needed(old: Root, new: Root, claims: Claims) -> Iterator[str]:
    """A rollback removes all segments, and a version those up to its step. Nothing else does."""
    if new.rollbacks != old.rollbacks:
        yield from (f"segment {one.number} is of a history that was rolled back" for one in new.segments)
        return
    newest = max((entry.step for entry in new.versions[-1:]), default=-1)
    changed = new.versions[-1:] != old.versions[-1:]
    for one in new.segments:
        if one.step <= newest and (changed or one not in old.segments):
            yield f"segment {one.number} is not after the newest version"
    for one in set(old.segments) - set(new.segments):
        if one.step > newest:
            yield f"segment {one.number} is removed although it is needed"


SwapRule = Callable[[Root, Root, Claims], Iterable[str]]
RootRule = Callable[[Root], Iterable[str]]
_Rule = TypeVar("_Rule", bound=Callable[..., object])

OF_SWAP: tuple[SwapRule, ...] = (
    writer_in_charge,
    epoch_rises,
    next_id_grows,
    one_commit,
    removals_noted,
    newest_stays,
    verified_stays,
    pinned_stays,
    replacements_noted,
    replacement_is_same,
    notes_on_old_versions,
)
OF_ROOT: tuple[RootRule, ...] = (ids_ascend, attempts_once, bases_live, bases_complete, chains_bounded, names_live)
OF_ROLLBACK: tuple[SwapRule, ...] = (commit_after_rollback, only_rollbacks_move, history_stays)
OF_SEGMENTS: tuple[SwapRule, ...] = (one_segment, segments_needed)


def _named(rules: tuple[_Rule, ...], first: int) -> Iterator[tuple[str, _Rule]]:
    for number, rule in enumerate(rules, first):
        yield f"I{number} {getattr(rule, '__name__', '')}", rule


def _attempts(entries: Iterable[Entry | Dropped | Rewrite]) -> set[tuple[int, str]]:
    return {(entry.id, entry.attempt) for entry in entries}


def _replaced(old: Root, new: Root) -> list[tuple[Entry, Entry]]:
    """Entries of one id before and after, where they differ."""
    before = {entry.id: entry for entry in old.listed}
    return [(before[entry.id], entry) for entry in new.listed if before.get(entry.id, entry) != entry]


def _bases(root: Root) -> Iterator[tuple[Entry, int]]:
    return ((entry, base) for entry in root.listed for base in entry.bases)


def _refuse(name: str, broken: Iterable[str]) -> None:
    for what in broken:
        raise InvariantError(f"{name}: {what}", subject=keys.ROOT)
