"""Each invariant of the root refuses a swap that breaks it, by its name. The specification, the module, and the tests list the
same invariants.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raystow.storage.errors import Damaged, Fenced, InvariantError
from raystow.storage.format.root import Dropped, Entry, Rewrite, RolledBack, Root, Segment
from raystow.storage.limits import MAX_CHAIN, MAX_SEGMENTS
from raystow.storage.repository import create_repository
from raystow.storage.root import invariants
from raystow.storage.root.history import roll_back, without
from raystow.storage.root.invariants import Claims, Fence
from raystow.storage.runtime.clock import SYSTEM

SPEC = Path(__file__).parents[4] / "docs" / "spec" / "format-v1.md"


def entry(id: int, *bases: int, thin: bool = False, attempt: str = "a") -> Entry:
    return Entry(id, f"{attempt}{id}", "d", 1, id, 1.0, 9, 9, bases, ("weights",) if thin else ())


def anew(old: Entry, **changes: object) -> Entry:
    """Return the entry of a version that is replaced by attempt ``b``."""
    return replace(old, attempt=f"b{old.id}", saved=old.origin, **changes)  # type: ignore[arg-type]


ONE, TWO, THREE, FOUR, FIVE = entry(1, thin=True), entry(2), entry(3, 2), entry(4), entry(5)
OLD = Root(
    "cafe",
    epoch=3,
    owner="me",
    next_id=6,
    pins={"good": 2},
    versions=(ONE, TWO, THREE, FOUR, FIVE),
    dropped=(Dropped(1, "x1", 5.0),),
    verified=4,
    rewrites=(Rewrite(3, "b3", 6.0), Rewrite(2, "b2", 6.0), Rewrite(4, "b4", 6.0), Rewrite(1, "b1", 6.0)),
)


def with_versions(*versions: Entry, **changes: object) -> Root:
    """Return the root with these versions, and with notes of the removed versions."""
    gone = [one for one in OLD.versions if one not in versions]
    notes = tuple(note for note in OLD.rewrites if note.attempt not in {one.attempt for one in versions})
    fields = {"dropped": (*OLD.dropped, *(Dropped(one.id, one.attempt, 9.0) for one in gone)), "rewrites": notes, **changes}
    return replace(OLD, versions=versions, **fields)  # type: ignore[arg-type]


def commit(*added: Entry, **changes: object) -> Root:
    return with_versions(*OLD.versions, *added, **{"next_id": 7, **changes})


def rolled_back(*entries: Entry, after: int = 5) -> tuple[RolledBack, ...]:
    """Return these versions as rolled back, each after the one before it."""
    ids = [after, *(one.id for one in entries)]
    return tuple(RolledBack(one, before, 8.0) for one, before in zip(entries, ids, strict=False))


SIX, SEVEN, EIGHT = entry(6), entry(7, 6), entry(8)
FORKED = replace(OLD, next_id=9, versions=(*OLD.versions, EIGHT), rolled_back=rolled_back(SIX, SEVEN), rollbacks=1)
"""Versions 6 and 7 were rolled back; then version 8 was committed."""


def segment(number: int, step: int) -> Segment:
    return Segment(number, f"s{number}", "d", 1, step, "g", 1.0, 9)


JOURNALED = replace(FORKED, segments=(segment(3, 9), segment(5, 12)), next_segment=6)
"""Two segments after version 8."""


def with_segment(number: int, step: int, **changes: object) -> Root:
    added = (*JOURNALED.segments, segment(number, step))
    return replace(JOURNALED, **{"segments": added, "next_segment": number + 1, **changes})  # type: ignore[arg-type]


FOURTH = anew(FOUR)
THIRD = anew(THREE, bases=())

ALLOWED = {
    "nothing": (OLD, Claims(Fence(3, "me"))),
    "a new epoch": (replace(OLD, epoch=4, owner="you"), Claims()),
    "a commit": (commit(entry(6, 5)), Claims(Fence(3, "me"))),
    "a commit that skips ids": (commit(entry(9), next_id=10), Claims()),
    "a drop": (with_versions(ONE, TWO, FOUR, FIVE), Claims()),
    "a release": (with_versions(ONE, FOUR, FIVE, pins={}), Claims(released=frozenset({"good"}))),
    "a note": (replace(OLD, rewrites=(*OLD.rewrites, Rewrite(1, "c1", 7.0))), Claims()),
    "a note struck out": (replace(OLD, rewrites=()), Claims()),
    "spent ids": (replace(OLD, next_id=50), Claims()),
    "collected": (replace(OLD, dropped=()), Claims()),
    "a pin": (replace(OLD, pins={"good": 4, "better": 2}), Claims()),
    "another verified": (replace(OLD, verified=0), Claims()),
    "written whole": (with_versions(ONE, TWO, THIRD, FOUR, FIVE), Claims(read=frozenset({THREE, TWO}))),
    "thinned": (with_versions(ONE, TWO, anew(THREE, groups=("weights",)), FOUR, FIVE), Claims(read=frozenset({THREE}))),
}

BROKEN = {
    "I1 writer_in_charge": [(commit(entry(6)), Claims(fence)) for fence in (Fence(2, "me"), Fence(3, "you"), Fence(4, "me"))],
    "I2 epoch_rises": [
        (replace(OLD, epoch=4), Claims()),
        (replace(OLD, epoch=2, owner="you"), Claims()),
        (replace(OLD, owner="you"), Claims()),
        (replace(OLD, repository="beef"), Claims()),
    ],
    "I3 next_id_grows": [(replace(OLD, next_id=5), Claims())],
    "I4 one_commit": [
        (commit(entry(6), entry(7), next_id=8), Claims()),
        (commit(entry(6), next_id=9), Claims()),
        (replace(OLD, versions=(entry(6), *OLD.versions)), Claims()),
        (with_versions(ONE, TWO, FOUR, FIVE, entry(6), next_id=7), Claims()),
    ],
    "I5 removals_noted": [
        (replace(with_versions(ONE, TWO, FOUR, FIVE), dropped=OLD.dropped), Claims()),
        (replace(OLD, dropped=(*OLD.dropped, Dropped(2, "z", 9.0))), Claims()),
    ],
    "I6 newest_stays": [
        (with_versions(ONE, TWO, THREE, FOUR), Claims()),
        (with_versions(ONE, TWO, THREE, FOUR, anew(FIVE)), Claims()),
    ],
    "I7 verified_stays": [
        (with_versions(ONE, TWO, THREE, FIVE, verified=0), Claims()),
        (with_versions(ONE, TWO, THREE, FOURTH, FIVE), Claims()),
    ],
    "I8 pinned_stays": [
        (with_versions(ONE, THREE, FOUR, FIVE, pins={}), Claims()),
        (with_versions(ONE, anew(TWO, groups=("weights",)), THREE, FOUR, FIVE), Claims()),
        (with_versions(ONE, anew(TWO, bases=(1,)), THREE, FOUR, FIVE), Claims(released=frozenset({"bad"}))),
    ],
    "I9 replacements_noted": [
        (with_versions(ONE, TWO, replace(THIRD, attempt="c3"), FOUR, FIVE), Claims()),
        (replace(with_versions(ONE, TWO, THIRD, FOUR, FIVE), rewrites=OLD.rewrites), Claims()),
        (with_versions(ONE, TWO, THIRD, FOUR, FIVE), Claims(read=frozenset({THREE, anew(TWO)}))),
        (with_versions(anew(ONE), TWO, THIRD, FOUR, FIVE), Claims()),
    ],
    "I10 replacement_is_same": [
        (with_versions(ONE, TWO, replace(THIRD, step=9), FOUR, FIVE), Claims()),
        (with_versions(ONE, TWO, replace(THIRD, saved="z"), FOUR, FIVE), Claims()),
        (with_versions(anew(ONE, groups=()), TWO, THREE, FOUR, FIVE), Claims()),
    ],
    "I11 notes_on_old_versions": [(replace(OLD, rewrites=(*OLD.rewrites, Rewrite(id, "c", 7.0))), Claims()) for id in (5, 6)],
    "I12 ids_ascend": [
        (commit(entry(6), next_id=6), Claims()),
        (replace(OLD, versions=OLD.versions[::-1]), Claims()),
        (with_versions(ONE, TWO, anew(TWO), THREE, FOUR, FIVE), Claims()),
    ],
    "I13 attempts_once": [
        (commit(replace(entry(6), attempt="x"), dropped=OLD.dropped, rewrites=(Rewrite(6, "x", 1.0),)), Claims()),
        (commit(entry(6), rewrites=(*OLD.rewrites, OLD.rewrites[0])), Claims()),
    ],
    "I14 bases_live": [
        (commit(entry(6, 9)), Claims()),
        (commit(entry(6, 6)), Claims()),
        (with_versions(ONE, THREE, FOUR, FIVE, pins={}), Claims(released=frozenset({"good"}))),
    ],
    "I15 bases_complete": [
        (commit(entry(6, 1)), Claims()),
        (with_versions(ONE, anew(TWO, groups=("weights",)), THREE, FOUR, FIVE), Claims(released=frozenset({"good"}))),
    ],
    "I16 chains_bounded": [],
    "I17 names_live": [
        (replace(OLD, verified=7), Claims()),
        (replace(OLD, pins={"good": 2, "bad": 7}), Claims()),
        (replace(OLD, pins={"good": 2, "bad": 0}), Claims()),
        (with_versions(ONE, FOUR, FIVE), Claims(released=frozenset({"good"}))),
    ],
    "I18 commit_after_rollback": [
        (replace(FORKED, next_id=10, versions=(*FORKED.versions, entry(9))), Claims(rollbacks=0)),
        (with_segment(6, 14), Claims(rollbacks=0)),
    ],
    "I19 only_rollbacks_move": [
        (replace(roll_back(FORKED, 5, 9.0), rollbacks=1), Claims()),
        (replace(roll_back(FORKED, 7, 9.0), rollbacks=1), Claims()),
        (replace(roll_back(FORKED, 7, 9.0), rollbacks=3), Claims()),
        (replace(FORKED, rollbacks=0), Claims()),
        (without(roll_back(FORKED, 7, 9.0), {1}), Claims()),
        (replace(FORKED, rollbacks=2, versions=(), rolled_back=rolled_back(*FORKED.listed, after=0)), Claims()),
    ],
    "I20 history_stays": [
        (replace(FORKED, rolled_back=rolled_back(SIX, SEVEN, after=4)), Claims()),
        (replace(roll_back(FORKED, 7, 9.0), versions=FORKED.listed, rolled_back=()), Claims()),
        (replace(without(FORKED, {5, 8}), rolled_back=FORKED.rolled_back), Claims()),
    ],
    "I21 one_segment": [
        (with_segment(5, 14), Claims()),
        (with_segment(6, 14, next_segment=9), Claims()),
        (with_segment(6, 14, segments=(segment(6, 14), *JOURNALED.segments)), Claims()),
        (with_segment(7, 15, segments=(*JOURNALED.segments, segment(6, 14), segment(7, 15))), Claims()),
        (with_segment(6, 14, versions=(*FORKED.versions, entry(9)), next_id=10), Claims()),
        (replace(JOURNALED, next_segment=5), Claims()),
    ],
    "I22 segments_needed": [
        (replace(JOURNALED, versions=(*FORKED.versions, entry(9)), next_id=10), Claims()),
        (replace(JOURNALED, segments=JOURNALED.segments[1:]), Claims()),
        (replace(JOURNALED, segments=()), Claims()),
        (with_segment(6, 8), Claims()),
        (replace(roll_back(JOURNALED, 8, 9.0), segments=JOURNALED.segments), Claims()),
    ],
}


ALLOWED_AFTER_ROLLBACK = {
    "a commit": (replace(FORKED, next_id=10, versions=(*FORKED.versions, entry(9))), Claims(rollbacks=1)),
    "a rollback": (roll_back(FORKED, 4, 9.0), Claims()),
    "the way back": (roll_back(FORKED, 7, 9.0), Claims()),
    "to the newest": (roll_back(FORKED, 8, 9.0), Claims()),
    "a pin": (replace(FORKED, pins={"good": 2, "evidence": 7}), Claims()),
    "a drop": (replace(without(FORKED, {7}), dropped=(*OLD.dropped, Dropped(7, "a7", 9.0))), Claims()),
    "a segment": (with_segment(7, 14), Claims(rollbacks=1)),
    "a commit that makes a segment unnecessary": (JOURNALED.with_version(entry(9)), Claims()),
    "a commit of an earlier step": (JOURNALED.with_version(replace(entry(9), step=2)), Claims()),
    "spent segments": (replace(JOURNALED, next_segment=9), Claims()),
    "a rollback of segments": (roll_back(JOURNALED, 8, 9.0), Claims()),
    "a drop of what it follows": (
        replace(without(FORKED, {5}), dropped=(*OLD.dropped, Dropped(5, "a5", 9.0))),
        Claims(),
    ),
}


def old_of(name: str) -> Root:
    """Return the root before the swaps of an invariant."""
    if name[:3] in ("I21", "I22"):
        return JOURNALED
    return FORKED if name[:3] in ("I18", "I19", "I20") else OLD


@pytest.mark.parametrize("name", ALLOWED)
def test_a_valid_swap_is_accepted(name: str) -> None:
    new, claims = ALLOWED[name]
    invariants.check(OLD, new, claims)


@pytest.mark.parametrize("name", ALLOWED_AFTER_ROLLBACK)
def test_a_valid_swap_is_accepted_after_a_rollback(name: str) -> None:
    new, claims = ALLOWED_AFTER_ROLLBACK[name]
    invariants.check(JOURNALED if new.next_segment > 1 else FORKED, new, claims)


def test_a_rolled_back_version_keeps_its_bases_and_pins() -> None:
    """The invariants of pins, bases, and notes of removals include rolled-back versions; ``verified`` may name live versions
    only.
    """
    pinned = replace(FORKED, pins={"evidence": 7})
    invariants.check(pinned, replace(pinned, next_id=10))
    gone = (*OLD.dropped, Dropped(7, "a7", 9.0))
    with pytest.raises(InvariantError, match="I8 pinned_stays"):
        invariants.check(pinned, replace(without(pinned, {7}), pins={}, dropped=gone))
    with pytest.raises(InvariantError, match="I14 bases_live"):
        invariants.check(FORKED, replace(without(FORKED, {6}), dropped=(*OLD.dropped, Dropped(6, "a6", 9.0))))
    with pytest.raises(InvariantError, match="I14 bases_live"):
        invariants.check(FORKED, replace(FORKED, next_id=10, versions=(*FORKED.versions, entry(9, 6))))
    with pytest.raises(InvariantError, match="I5 removals_noted"):
        invariants.check(FORKED, without(FORKED, {7}))
    with pytest.raises(InvariantError, match="I17 names_live"):
        invariants.check(FORKED, replace(FORKED, verified=7))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BROKEN.items() for case in range(len(cases))])
def test_a_swap_that_breaks_an_invariant_is_refused(name: str, case: int) -> None:
    """The swap may break other invariants as well. The error names the first one."""
    new, claims = BROKEN[name][case]
    if name == "I1 writer_in_charge":
        with pytest.raises(Fenced, match=r"(has replaced|was put back instead of) epoch"):
            invariants.check(OLD, new, claims)
        return
    with pytest.raises(InvariantError):
        invariants.check(old_of(name), new, claims)
    assert name in broken(old_of(name), new, claims)


def broken(old: Root, new: Root, claims: Claims) -> list[str]:
    """Return the names of the broken invariants in the order of the checks."""
    of_root = [lambda old, new, claims, of=of: set(of(new)) - set(of(old)) for of in invariants.OF_ROOT]
    rules = [*invariants.OF_SWAP, *invariants.OF_ROLLBACK, *invariants.OF_SEGMENTS, *of_root]
    numbered = invariants.names()
    ends = len(invariants.OF_SWAP), len(invariants.OF_SWAP) + len(of_root)
    names = [*numbered[: ends[0]], *numbered[ends[1] :], *numbered[ends[0] : ends[1]]]
    return [name for name, rule in zip(names, rules, strict=True) if list(rule(old, new, claims))]  # type: ignore[operator]


@pytest.mark.parametrize(("name", "case"), [(name, 0) for name, cases in BROKEN.items() if cases and name[:3] != "I1 "])
def test_the_message_begins_with_the_name(name: str, case: int) -> None:
    new, claims = BROKEN[name][case]
    first = broken(old_of(name), new, claims)[0]
    with pytest.raises(InvariantError, match=rf"root\.json: {first}: "):
        invariants.check(old_of(name), new, claims)


def test_a_chain_beyond_the_limit_is_refused() -> None:
    chain = tuple(entry(id, *([id - 1] if id > 1 else [])) for id in range(1, MAX_CHAIN + 1))
    old = Root("cafe", next_id=MAX_CHAIN + 1, versions=chain)
    new = replace(old, next_id=MAX_CHAIN + 2, versions=(*chain, entry(MAX_CHAIN + 1, MAX_CHAIN)))
    with pytest.raises(InvariantError, match="I16 chains_bounded"):
        invariants.check(old, new)
    invariants.check(None, old)


def test_segments_beyond_the_limit_are_refused() -> None:
    full = tuple(segment(number, 14) for number in range(1, MAX_SEGMENTS + 1))
    old = replace(JOURNALED, segments=full[:-1], next_segment=MAX_SEGMENTS)
    last = replace(old, segments=full, next_segment=MAX_SEGMENTS + 1)
    more = replace(last, segments=(*full, segment(MAX_SEGMENTS + 1, 14)), next_segment=MAX_SEGMENTS + 2)
    invariants.check(old, last)
    with pytest.raises(InvariantError, match=f"I21 one_segment: there are {MAX_SEGMENTS + 1} segments"):
        invariants.check(last, more)


def test_an_already_broken_invariant_allows_other_swaps() -> None:
    """A root that lost a base by a manual change still accepts removals and commits."""
    old = replace(OLD, versions=(ONE, THREE, FOUR, FIVE), pins={"good": 2})
    invariants.check(old, replace(old, next_id=7, versions=(*old.versions, entry(6))))
    invariants.check(old, replace(old, pins={}))


def test_a_new_root_is_checked_without_an_old_root() -> None:
    invariants.check(None, OLD)
    with pytest.raises(InvariantError, match="I14 bases_live"):
        invariants.check(None, replace(OLD, versions=(ONE, THREE, FOUR, FIVE), pins={}))


def test_a_broken_invariant_leaves_the_root_unchanged() -> None:
    repository = create_repository(f"memory://invariants-{SYSTEM.token()}")
    before = repository.root()
    with pytest.raises(InvariantError, match="I17 names_live"):
        repository.register.update(lambda root: replace(root, pins={"x": 1}))
    assert repository.root() == before


def test_a_root_of_another_repository_is_refused() -> None:
    repository = create_repository(f"memory://invariants-{SYSTEM.token()}")
    tagged = repository.store.get_tagged("root.json", max_bytes=1 << 20)
    repository.store.put_if("root.json", replace(repository.root(), repository="beef").dump(), tagged.tag)
    with pytest.raises(Damaged, match="belongs to repository beef"):
        repository.register.update(lambda root: replace(root, pins={}))


def test_spec_module_and_tests_list_the_same_invariants() -> None:
    section = SPEC.read_text().partition("## Invariants of the root\n")[2].partition("\n## ")[0]
    documented = [f"{number} {name}" for number, name in re.findall(r"^\| (I\d+) \| `(\w+)` \|", section, re.MULTILINE)]
    assert documented == invariants.names() == list(BROKEN)
