"""The versions that a policy keeps, thins, and drops, and the reasons that a plan states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.builders import difference, entry

from raystow.storage.errors import StateError
from raystow.storage.format.root import Entry
from raystow.storage.retention.policy import Decision, Policy, plan

LOSSES: dict[int, dict[str, Any]] = {
    1: {"loss": 3.0},
    2: {"loss": math.nan},
    3: {"loss": 1.0},
    4: {"loss": True},
    5: {"loss": None},
    6: {"acc": 0.1},
    7: {"loss": 1},
    8: {"loss": "0"},
    9: {"loss": math.inf},
}


def kept(entries: list[Entry], policy: Policy, pins: dict[str, int] = {}, metrics: Any = {}) -> list[int]:  # noqa: B006
    return [decision.entry.id for decision in plan(entries, policy, pins=pins, metrics=metrics) if decision.keep]


NINE = [entry(id, created=1800.0 * id) for id in range(1, 10)]


@pytest.mark.parametrize(
    ("policy", "ids"),
    [
        (Policy(), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (Policy(keep_last=3), [7, 8, 9]),
        (Policy(keep_last=99), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (Policy(keep_every=300), [2, 5, 8, 9]),  # steps 100 to 200, 300 to 500, 600 to 800, 900
        (Policy(keep_every_seconds=3600), [1, 3, 5, 7, 9]),
        # of versions with equal metrics the newer one is kept; version 9 is the newest
        (Policy(keep_best=("loss", "min", 1)), [7, 9]),
        (Policy(keep_best=("loss", "min", 99)), [1, 3, 7, 9]),
        (Policy(keep_best=("loss", "max", 2)), [1, 9]),
        (Policy(keep_best=("lost", "max", 2)), [9]),
        (Policy(max_bytes=35), [7, 8, 9]),
        (Policy(max_bytes=1), [9]),
        (Policy(keep_every=300, max_bytes=25), [8, 9]),
        (Policy(keep_last=1, keep_every=300), [2, 5, 8, 9]),
    ],
)
def test_a_policy_keeps_the_expected_versions(policy: Policy, ids: list[int]) -> None:
    assert kept(NINE, policy, metrics=LOSSES) == ids
    assert kept([], policy) == []


def test_pinned_versions_are_kept_whatever_the_rules() -> None:
    assert kept(NINE, Policy(keep_last=1), {"a": 4, "b": 4, "gone": 77}) == [4, 9]
    assert kept(NINE, Policy(keep_every=300, keep_best=("loss", "min", 1)), {"a": 4}, LOSSES) == [2, 4, 5, 7, 8, 9]


def test_pinned_versions_count_for_max_bytes_but_stay() -> None:
    assert kept(NINE, Policy(max_bytes=35), {"a": 1}) == [1, 8, 9]
    assert kept(NINE, Policy(max_bytes=35), {"a": 1, "b": 2, "c": 3, "d": 4}) == [1, 2, 3, 4, 9]


def test_steps_that_go_back_leave_one_version_for_each_run() -> None:
    entries = [entry(1, 900), entry(2, 1900), entry(3, 950), entry(4, 2000)]
    assert kept(entries, Policy(keep_every=1000)) == [2, 3, 4]


def kept_of(policy: Policy, rolled_back: set[int], **more: Any) -> tuple[list[int], list[int]]:
    """Return the live and the rolled-back versions that are kept."""
    made = plan(NINE, policy, metrics=LOSSES, rolled_back=rolled_back, **{"pins": {}, **more})
    ids = [decision.entry.id for decision in made if decision.keep]
    return [id for id in ids if id not in rolled_back], [id for id in ids if id in rolled_back]


@pytest.mark.parametrize(
    ("policy", "rolled_back", "ids"),
    [
        (Policy(), {7, 8, 9}, ([1, 2, 3, 4, 5, 6], [7, 8, 9])),
        (Policy(keep_last=2), {7, 8, 9}, ([5, 6], [8, 9])),
        (Policy(keep_last=2), {5, 6, 7}, ([8, 9], [])),  # two versions were committed since
        (Policy(keep_last=3), {6, 7, 8}, ([4, 5, 9], [7, 8])),
        (Policy(keep_every=300), {7, 8, 9}, ([2, 5, 6], [8, 9])),
        (Policy(keep_every=300), {7}, ([2, 5, 8, 9], [])),  # another version has reached as high a step
        (Policy(keep_best=("loss", "min", 1)), {7}, ([3, 9], [7])),
        (Policy(max_bytes=35), {7, 8, 9}, ([4, 5, 6], [])),
        (Policy(max_bytes=75), {7, 8, 9}, ([1, 2, 3, 4, 5, 6], [9])),
        (Policy(drop_rolled_back=True), {7, 8}, ([1, 2, 3, 4, 5, 6, 9], [])),
        (Policy(keep_last=3, drop_rolled_back=True), {7, 8}, ([5, 6, 9], [])),
    ],
)
def test_rolled_back_versions_do_not_replace_live_ones(
    policy: Policy, rolled_back: set[int], ids: tuple[list[int], list[int]]
) -> None:
    assert kept_of(policy, rolled_back) == ids


def test_pins_leases_and_deltas_keep_rolled_back_versions() -> None:
    policy, leased = Policy(keep_last=1, drop_rolled_back=True), {(7, NINE[6].attempt)}
    assert kept_of(policy, {5, 6, 7, 8}, pins={"evidence": 5}, leased=leased) == ([9], [5, 7])
    entries = [*NINE[:6], difference(7, 6), difference(8, 7), entry(9)]
    made = plan(entries, policy, pins={"evidence": 8}, metrics={}, rolled_back={7, 8})
    assert [decision.entry.id for decision in made if decision.keep] == [6, 7, 8, 9]


def test_a_rolled_back_version_is_not_rewritten() -> None:
    assert [d.entry.id for d in plan(NINE, Policy(resumable=2), pins={}, metrics={}, rolled_back={6, 8}) if d.thin] == [
        1,
        2,
        3,
        4,
        5,
    ]
    thinned = [replace(one, groups=("weights",)) if one.id == 4 else one for one in NINE]
    made = plan(thinned, Policy(resumable=2, delta=6), pins={}, metrics={}, rolled_back={4})
    assert {d.entry.id: d.base for d in made if d.thin} == {1: None, 2: 1, 3: 2, 5: 3, 6: 5, 7: 6}
    entries = [entry(1), difference(2, 1, stored=1), entry(3), entry(4)]
    first, second, *_ = plan(entries, Policy(keep_last=1), pins={"a": 2}, metrics={}, rolled_back={2}, compact=True)
    assert first.why == "base of version 2: version 2 is rolled back"
    assert second.verdict == "keep"


def test_a_decision_states_its_reasons() -> None:
    first, second, third = plan(NINE[:3], Policy(keep_last=2, keep_every=1000, max_bytes=10), pins={"a": 1, "b": 1}, metrics={})
    assert first.rules == ("pinned as a", "pinned as b")
    assert (second.keep, second.why) == (False, "over max_bytes, in spite of last 2")
    assert plan(NINE[:2], Policy(max_bytes=1), pins={}, metrics={})[0].why == "over max_bytes"
    assert third.rules == ("newest", "last 2", "newest of steps 0 to 999")
    hourly = plan(NINE[:3], Policy(keep_every_seconds=5400), pins={}, metrics={})
    assert [decision.rules for decision in hourly] == [
        ("no rule keeps it",),
        ("newest of its 90 min",),
        ("newest", "newest of its 90 min"),
    ]
    assert plan(NINE[:2], Policy(), pins={}, metrics={})[0].why == "no rule drops it"


def test_an_unreadable_record_is_no_worst_metric() -> None:
    policy = Policy(keep_best=("loss", "min", 1))
    made = plan(NINE, policy, pins={}, metrics=LOSSES, unread={2, 5}, rolled_back={5})
    whys = {decision.entry.id: decision.why for decision in made if decision.keep}
    assert whys == {2: "unreadable record", 5: "unreadable record, rolled back", 7: "best loss (min)", 9: "newest"}
    made = plan(NINE, replace(policy, max_bytes=15), pins={}, metrics=LOSSES, unread={2})
    assert made[1].why == "over max_bytes, in spite of unreadable record"
    assert not plan(NINE, Policy(keep_last=1), pins={}, metrics={}, unread={2})[1].keep


@pytest.mark.parametrize(
    ("policy", "ids"),
    [
        (Policy(resumable=9), []),
        (Policy(resumable=3), [1, 2, 3, 5, 6]),  # version 4 is pinned
        (Policy(resumable=1), [1, 2, 3, 5, 6, 7, 8]),
        (Policy(keep_last=4, resumable=2), [6, 7]),
        (Policy(keep_every=300, resumable=2), [2, 5]),
    ],
)
def test_a_policy_thins_the_expected_versions(policy: Policy, ids: list[int]) -> None:
    made = plan(NINE, policy, pins={"a": 4}, metrics={})
    assert [decision.entry.id for decision in made if decision.thin] == ids
    assert all(decision.keep for decision in made if decision.thin)
    assert {decision.verdict for decision in made} <= {"keep", "thin", "drop"}


def test_verified_and_leased_versions_are_not_thinned() -> None:
    """A thinned version does not count as resumable."""
    entries = [*NINE[:5], *(replace(one, groups=("weights",)) for one in NINE[5:8]), NINE[8]]
    made = plan(entries, Policy(resumable=2), pins={}, metrics={}, verified=2, leased={(3, entries[2].attempt)})
    assert [decision.entry.id for decision in made if decision.thin] == [1, 4]
    assert made[3].why == "no rule drops it; older than the last 2 resumable"
    assert made[3].verdict == "thin"


def test_max_bytes_counts_thinned_sizes_once_known() -> None:
    made = plan(NINE, Policy(resumable=2, max_bytes=35), pins={}, metrics={})
    assert [decision.verdict for decision in made] == ["thin"] * 7 + ["keep"] * 2
    made = plan(NINE, Policy(resumable=4, max_bytes=35), pins={}, metrics={})
    # the oldest versions are dropped first, thinned or not
    assert [decision.verdict for decision in made] == ["drop"] * 6 + ["keep"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"resumable": 0},
        {"resumable": True},
        {"delta": 1},
        {"delta": 0, "resumable": 1},
        {"delta": 11, "resumable": 1},
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_every": 1.5},
        {"keep_every_seconds": 0.5},
        {"keep_every_seconds": math.nan},
        {"keep_every_seconds": math.inf},
        {"keep_best": ("loss", "least", 1)},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("loss", "min", True)},
        {"keep_best": "loss"},
        {"max_bytes": -1},
        {"max_bytes": 1 << 63},  # no message or record can represent it
    ],
)
def test_an_invalid_policy_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(wrong))) as caught:
        Policy(**wrong)
    assert caught.value.remedy


def test_a_decision_is_data() -> None:
    assert plan([NINE[0]], Policy(keep_last=1), pins={}, metrics={}) == (Decision(NINE[0], True, ("newest", "last 1")),)
