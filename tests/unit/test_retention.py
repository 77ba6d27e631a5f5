"""Retention: what a policy keeps, and that a plan made on an old root drops nothing that was committed or pinned since."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from builders import empty_record, live_ids, orphans, overwrite_root
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.committer import Committer
from raystow.storage.errors import Damaged, SaveFailed, StateError, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Decision, Policy, plan
from raystow.storage.version import Version

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


def entry(id: int, step: int | None = None, created: float = 0.0, stored: int = 10) -> Entry:
    return Entry(id, f"{id:016x}", "00", 1, 100 * id if step is None else step, created, 20, stored)


def difference(id: int, *bases: int, stored: int = 10) -> Entry:
    return replace(entry(id, stored=stored), bases=bases)


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
        (Policy(keep_best=("loss", "min", 1)), [7, 9]),  # of equals the newer; 9 is the newest
        (Policy(keep_best=("loss", "min", 99)), [1, 3, 7, 9]),
        (Policy(keep_best=("loss", "max", 2)), [1, 9]),
        (Policy(keep_best=("lost", "max", 2)), [9]),
        (Policy(max_bytes=35), [7, 8, 9]),
        (Policy(max_bytes=1), [9]),
        (Policy(keep_every=300, max_bytes=25), [8, 9]),
        (Policy(keep_last=1, keep_every=300), [2, 5, 8, 9]),
    ],
)
def test_what_a_policy_keeps(policy: Policy, ids: list[int]) -> None:
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
    """The live and the rolled-back versions of nine that are kept."""
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
        (Policy(keep_every=300), {7}, ([2, 5, 8, 9], [])),  # another one has come as far
        (Policy(keep_best=("loss", "min", 1)), {7}, ([3, 9], [7])),
        (Policy(max_bytes=35), {7, 8, 9}, ([4, 5, 6], [])),
        (Policy(max_bytes=75), {7, 8, 9}, ([1, 2, 3, 4, 5, 6], [9])),
        (Policy(drop_rolled_back=True), {7, 8}, ([1, 2, 3, 4, 5, 6, 9], [])),
        (Policy(keep_last=3, drop_rolled_back=True), {7, 8}, ([5, 6, 9], [])),
    ],
)
def test_a_rolled_back_version_takes_no_other_ones_place(
    policy: Policy, rolled_back: set[int], ids: tuple[list[int], list[int]]
) -> None:
    assert kept_of(policy, rolled_back) == ids


def test_pins_leases_and_deltas_keep_rolled_back_versions() -> None:
    policy, leased = Policy(keep_last=1, drop_rolled_back=True), {(7, NINE[6].attempt)}
    assert kept_of(policy, {5, 6, 7, 8}, pins={"evidence": 5}, leased=leased) == ([9], [5, 7])
    entries = [*NINE[:6], difference(7, 6), difference(8, 7), entry(9)]
    made = plan(entries, policy, pins={"evidence": 8}, metrics={}, rolled_back={7, 8})
    assert [decision.entry.id for decision in made if decision.keep] == [6, 7, 8, 9]


def test_a_rolled_back_version_is_not_written_again() -> None:
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


def test_a_decision_says_why() -> None:
    first, second, third = plan(NINE[:3], Policy(keep_last=2, keep_every=1000, max_bytes=10), pins={"a": 1, "b": 1}, metrics={})
    assert first.rules == ("pinned as a", "pinned as b")
    assert (second.keep, second.why) == (False, "over max_bytes, in spite of last 2")
    assert third.rules == ("newest", "last 2", "newest of steps 0 to 999")
    hourly = plan(NINE[:3], Policy(keep_every_seconds=5400), pins={}, metrics={})
    assert [decision.rules for decision in hourly] == [
        ("no rule keeps it",),
        ("newest of its 90 min",),
        ("newest", "newest of its 90 min"),
    ]
    assert plan(NINE[:2], Policy(), pins={}, metrics={})[0].why == "no rule drops it"


@pytest.mark.parametrize(
    ("policy", "ids"),
    [
        (Policy(resumable=9), []),
        (Policy(resumable=3), [1, 2, 3, 5, 6]),  # 4 is pinned
        (Policy(resumable=1), [1, 2, 3, 5, 6, 7, 8]),
        (Policy(keep_last=4, resumable=2), [6, 7]),
        (Policy(keep_every=300, resumable=2), [2, 5]),
    ],
)
def test_what_a_policy_thins(policy: Policy, ids: list[int]) -> None:
    made = plan(NINE, policy, pins={"a": 4}, metrics={})
    assert [decision.entry.id for decision in made if decision.thin] == ids
    assert all(decision.keep for decision in made if decision.thin)
    assert {decision.verdict for decision in made} <= {"keep", "thin", "drop"}


def test_verified_and_leased_versions_are_not_thinned() -> None:
    """Thinned versions do not count as verified ones."""
    entries = [*NINE[:5], *(replace(one, groups=("weights",)) for one in NINE[5:8]), NINE[8]]
    made = plan(entries, Policy(resumable=2), pins={}, metrics={}, verified=2, leased={(3, entries[2].attempt)})
    assert [decision.entry.id for decision in made if decision.thin] == [1, 4]
    assert made[3].why == "no rule drops it; older than the last 2 resumable"
    assert made[3].verdict == "thin"


def test_max_bytes_counts_thinned_sizes_once_known() -> None:
    made = plan(NINE, Policy(resumable=2, max_bytes=35), pins={}, metrics={})
    assert [decision.verdict for decision in made] == ["thin"] * 7 + ["keep"] * 2
    made = plan(NINE, Policy(resumable=4, max_bytes=35), pins={}, metrics={})
    assert [decision.verdict for decision in made] == ["drop"] * 6 + ["keep"] * 3  # the oldest go first, thin or not


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
        {"max_bytes": 1 << 63},  # no message and no record holds it
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(wrong))) as caught:
        Policy(**wrong)
    assert caught.value.remedy


# Any policy on any versions

small = st.integers(1, 12)
rules = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": small,
        "keep_every": st.integers(1, 40),
        "keep_every_seconds": st.floats(1, 50),
        "keep_best": st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), small),
    },
)
values = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=1))
many = st.lists(st.builds(entry, st.just(0), st.integers(0, 99), st.floats(0, 99), st.integers(0, 20)), max_size=12).map(
    lambda some: [replace(one, id=id) for id, one in enumerate(some, start=1)]
)
worlds = st.fixed_dictionaries(
    {
        "entries": many,
        "pins": st.dictionaries(st.sampled_from("abc"), small),
        "metrics": st.dictionaries(small, st.dictionaries(st.just("loss"), values)),
    }
)


def ids(world: dict[str, Any], **policy: Any) -> set[int]:
    return {decision.entry.id for decision in plan(policy=Policy(**policy), **world) if decision.keep}


def always(world: dict[str, Any]) -> set[int]:
    return {one.id for one in world["entries"]} & {len(world["entries"]), *world["pins"].values()}


@given(worlds, rules)
def test_keep_rules_are_united(world: dict[str, Any], policy: dict[str, Any]) -> None:
    alone = [ids(world, **{name: rule}) for name, rule in policy.items()] or [ids(world)]
    assert ids(world, **policy) == set().union(*alone)


@given(worlds, rules, st.none() | st.integers(1, 200))
def test_newest_and_pinned_versions_stay_with_reasons(world: Any, policy: Any, max_bytes: int | None) -> None:
    made = plan(policy=Policy(**policy, max_bytes=max_bytes), **world)
    assert [decision.entry for decision in made] == world["entries"]
    assert always(world) <= {decision.entry.id for decision in made if decision.keep}
    assert all(decision.rules and decision.why for decision in made)


@given(worlds, rules, st.integers(1, 200))
def test_max_bytes_is_kept_to_where_it_can_be(world: Any, policy: Any, max_bytes: int) -> None:
    stored = {one.id: one.stored for one in world["entries"]}
    without, within = ids(world, **policy), ids(world, **policy, max_bytes=max_bytes)
    assert within <= without
    assert sum(stored[id] for id in within) <= max(max_bytes, sum(stored[id] for id in always(world)))
    if lost := without - within:
        assert sum(stored[id] for id in within | {max(lost)}) > max_bytes  # not one too many
        assert max(lost) < min(within - always(world), default=len(stored) + 1)  # the oldest


@given(worlds, rules, st.integers(1, 12), st.integers(1, 200))
def test_a_weaker_policy_keeps_no_less(world: Any, policy: dict[str, Any], more: int, max_bytes: int) -> None:
    weaker = dict(policy)
    if "keep_last" in policy:
        weaker["keep_last"] += more
    if "keep_every" in policy:
        policy["keep_every"] *= more
    if "keep_best" in policy:
        metric, mode, number = policy["keep_best"]
        weaker["keep_best"] = (metric, mode, number + more)
    assert ids(world, **policy) <= ids(world, **weaker)
    assert not policy or ids(world, **policy) <= ids(world, **{"keep_last": more, **policy})
    assert ids(world, **policy, max_bytes=max_bytes) <= ids(world, **policy, max_bytes=max_bytes + more)


@given(worlds, rules, st.none() | st.integers(1, 200))
def test_a_plan_is_pure_and_carried_out_drops_no_more(world: Any, policy: Any, max_bytes: int | None) -> None:
    whole = Policy(**policy, max_bytes=max_bytes)
    before = repr(world)
    made = plan(policy=whole, **world)
    assert made == plan(policy=whole, **world)
    assert repr(world) == before
    rest = [decision.entry for decision in made if decision.keep]
    assert all(decision.keep for decision in plan(rest, whole, pins=world["pins"], metrics=world["metrics"]))


@given(worlds, rules, st.integers(1, 12), st.sets(small))
def test_thinning_drops_nothing_and_spares_the_newest(world: Any, policy: Any, resumable: int, thin: set[int]) -> None:
    entries = [replace(one, groups=("weights",) if one.id in thin else ()) for one in world["entries"]]
    world = {**world, "entries": entries}
    made = plan(policy=Policy(**policy, resumable=resumable), **world)
    kept = [decision for decision in made if decision.keep]
    assert {decision.entry.id for decision in kept} == ids(world, **policy)
    whole = [decision for decision in kept if decision.entry.resumable]
    thinned = {decision.entry.id for decision in made if decision.thin}
    assert thinned == {decision.entry.id for decision in whole[:-resumable]} - always(world)
    rest = [replace(d.entry, groups=("weights",)) if d.thin else d.entry for d in kept]
    again = plan(rest, Policy(**policy, resumable=resumable), pins=world["pins"], metrics=world["metrics"])
    assert all(decision.verdict == "keep" for decision in again), "carried out, it leaves nothing to do"


# On a repository


@pytest.fixture
def committer(repository: Repository) -> Committer:
    made = Committer(repository, "me")
    for step in range(1, 6):
        commit(made, step)
    return made


def commit(committer: Committer, step: int) -> None:
    committer.commit(replace(empty_record(committer, step), metrics={"loss": abs(step - 2.0)}))


def test_a_plan_changes_nothing_until_it_is_executed(repository: Repository, committer: Committer) -> None:
    before = repository.root()
    made = repository.plan_retention(Policy(keep_last=2))
    assert repository.root() == before
    assert made.explain()[2:4] == ["version 3 (step 3): dropped: no rule keeps it", "version 4 (step 4): kept: last 2"]
    objects = list(repository.store.list(""))
    assert [gone.id for gone in made.execute()] == [1, 2, 3]
    root = repository.root()
    assert (live_ids(repository), root.next_id, root.epoch) == ([4, 5], before.next_id, before.epoch)
    assert [info.key for info in repository.store.list("")] == [info.key for info in objects]
    assert len(orphans(repository)) == 3


def test_executing_again_writes_nothing(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=2))
    gone = made.execute()
    root = repository.root()
    assert made.execute() == gone
    assert repository.root() == root


def test_what_is_committed_or_pinned_after_the_plan_stays(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    repository.pin(repository.version(2), "good")
    commit(committer, 6)
    assert [gone.id for gone in made.execute()] == [1, 3, 4]
    assert live_ids(repository) == [2, 5, 6]


def test_what_is_committed_or_pinned_during_the_swap_stays(
    repository: Repository, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    put_if = repository.store.put_if

    def late(key: str, data: bytes, tag: str | None) -> str:
        monkeypatch.undo()
        repository.pin(repository.version(2), "good")
        commit(committer, 6)
        return put_if(key, data, tag)

    monkeypatch.setattr(repository.store, "put_if", late)
    assert [gone.id for gone in made.execute()] == [1, 3, 4]
    assert live_ids(repository) == [2, 5, 6]


def test_a_swap_whose_answer_is_lost_tells_what_it_dropped(
    repository: Repository, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    put_if = repository.store.put_if

    def lossy(key: str, data: bytes, tag: str | None) -> str:
        monkeypatch.undo()
        put_if(key, data, tag)
        commit(committer, 6)
        raise StoreUnavailable("connection reset", subject=key)

    monkeypatch.setattr(repository.store, "put_if", lossy)
    assert [gone.id for gone in made.execute()] == [1, 2, 3, 4]
    assert live_ids(repository) == [5, 6]


def test_two_plans_together_leave_the_newest(repository: Repository, committer: Committer) -> None:
    old = repository.plan_retention(Policy(keep_last=1))
    commit(committer, 6)
    repository.plan_retention(Policy(keep_last=1)).execute()
    assert live_ids(repository) == [6]
    old.execute()
    assert live_ids(repository) == [6]


def test_a_version_that_has_become_the_newest_stays(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    overwrite_root(repository, lambda root: replace(root, versions=root.versions[:4]))  # no plan does this
    assert [gone.id for gone in made.execute()] == [1, 2, 3]
    assert live_ids(repository) == [4]


def test_ids_go_on_after_versions_were_dropped(repository: Repository, committer: Committer) -> None:
    repository.plan_retention(Policy(keep_last=1)).execute()
    commit(Committer(repository, "next"), 6)
    assert live_ids(repository) == [5, 6]


def test_records_are_read_for_metrics_only(repository: Repository, committer: Committer) -> None:
    best = Policy(keep_best=("loss", "min", 1))
    assert [gone.id for gone in repository.plan_retention(best).dropped] == [1, 3, 4]
    one = repository.version(3)
    repository.store.delete([keys.record(one.id, one.attempt)])
    assert repository.plan_retention(Policy(1, 2, 3.0, None, 4)).dropped
    with pytest.raises(Damaged, match="missing"):
        repository.plan_retention(best)


def test_an_empty_repository(repository: Repository) -> None:
    made = repository.plan_retention(Policy(keep_last=1, keep_best=("loss", "min", 1)))
    assert (made.decisions, made.execute()) == ((), ())


def test_a_decision_is_data() -> None:
    assert plan([NINE[0]], Policy(keep_last=1), pins={}, metrics={}) == (Decision(NINE[0], True, ("newest", "last 1")),)


@pytest.mark.parametrize(
    ("policy", "ids"),
    [
        (Policy(keep_last=1), [4, 6, 7]),  # 7 is a difference to 6, and that to 4
        (Policy(keep_last=3), [1, 4, 5, 6, 7]),
        (Policy(keep_last=1, max_bytes=1), [4, 6, 7]),  # nothing of it can go
        (Policy(keep_last=3, max_bytes=45), [4, 6, 7]),  # 1 only serves 5, and goes with it
        (Policy(max_bytes=55), [1, 4, 5, 6, 7]),
        (Policy(max_bytes=35), [4, 6, 7]),
    ],
)
def test_what_a_kept_version_is_a_difference_to_is_kept(policy: Policy, ids: list[int]) -> None:
    entries = [entry(1), difference(2, 1), difference(3, 1), entry(4), difference(5, 1), difference(6, 4), difference(7, 6)]
    assert kept(entries, policy) == ids


def test_the_plan_says_what_needs_a_base() -> None:
    entries = [entry(1), difference(2, 1), difference(3, 1), difference(4, 3)]
    why = {d.entry.id: d.why for d in plan(entries, Policy(keep_last=1), pins={}, metrics={})}
    assert why[1] == "base of version 3"
    assert why[2] == "no rule keeps it"
    assert why[3] == "base of version 4"
    alone = plan([entry(1), entry(2), entry(3)], Policy(keep_last=1), pins={}, metrics={}, bases=[2])
    assert [d.why for d in alone] == ["no rule keeps it", "base of a save under way", "newest, last 1"]


@given(st.data())
def test_no_plan_leaves_a_version_without_its_bases(data: st.DataObject) -> None:
    entries: list[Entry] = []
    for id in range(1, data.draw(st.integers(2, 12))):
        bases = data.draw(st.sets(st.integers(1, id - 1), max_size=2)) if id > 1 else ()
        entries.append(difference(id, *sorted(bases), stored=data.draw(st.integers(0, 20))))
    one = st.none() | st.integers(1, 5)
    policy = Policy(data.draw(one), max_bytes=data.draw(st.none() | st.integers(1, 150)))
    pins = dict.fromkeys(data.draw(st.sets(st.sampled_from("ab"))), data.draw(st.integers(1, 12)))
    decisions = plan(entries, policy, pins=pins, metrics={})
    ids = {d.entry.id for d in decisions if d.keep}
    assert all(set(d.entry.bases) <= ids for d in decisions if d.keep)
    alike = plan([replace(one, bases=()) for one in entries], policy, pins=pins, metrics={})
    if policy.max_bytes is None:
        assert ids >= {d.entry.id for d in alike if d.keep}
    needless = [d for d in decisions if d.keep and d.why.startswith("base of")]
    assert all(any(d.entry.id in other.entry.bases for other in decisions if other.keep) for d in needless)


def write_difference(committer: Committer, *bases: int) -> Version:
    """A version that says that it is a difference to these."""
    info = FragmentInfo(0, 1, "ab" * 32, (0,), 0, 0, 0, bases=bases)
    return committer.commit(replace(empty_record(committer), fragments=(info,)))


def test_a_base_stays_for_a_commit_after_the_plan(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first, second = (committer.commit(empty_record(committer)) for _ in range(2))
    plan = repository.plan_retention(Policy(keep_last=1))
    assert plan.dropped == (first.entry,)
    third = write_difference(committer, first.id)
    assert plan.execute() == ()
    assert repository.versions() == [first, second, third]
    assert repository.plan_retention(Policy(keep_last=1)).execute() == (second.entry,)


def test_no_commit_succeeds_whose_base_was_dropped(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first, second = (committer.commit(empty_record(committer)) for _ in range(2))
    late = replace(empty_record(committer), fragments=(FragmentInfo(0, 1, "ab" * 32, (0,), 0, 0, 0, bases=(first.id,)),))
    assert repository.plan_retention(Policy(keep_last=1)).execute() == (first.entry,)
    with pytest.raises(SaveFailed, match=f"version {first.id}"):
        committer.commit(late)
    assert repository.versions() == [second]
    assert committer.commit(empty_record(committer)).id == late.id + 1, "the next save is not harmed"


def test_a_lease_covers_what_the_version_is_a_difference_to(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first = committer.commit(empty_record(committer))
    second = write_difference(committer, first.id)
    committer.commit(empty_record(committer))
    doomed = repository.plan_retention(Policy(keep_last=1))
    with repository.lease(second):
        assert doomed.execute() == (first.entry, second.entry)
        assert repository.plan_collection(grace=0).execute().attempts == 0
    assert repository.plan_collection(grace=0).execute().attempts == 2


def test_releasing_a_pin_leaves_what_others_are_differences_to(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first = committer.commit(empty_record(committer))
    repository.pin(first, "a")
    second = write_difference(committer, first.id)
    committer.commit(empty_record(committer))
    repository.pin(second, "b")
    assert repository.plan_release(["a"]).execute() == ()
    assert repository.root().pins == {"a": first.id, "b": second.id}
    assert repository.plan_release(["a", "b"]).execute() == (first.entry, second.entry)
