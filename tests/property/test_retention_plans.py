"""Properties of the plans of arbitrary retention policies on arbitrary versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.builders import difference, entry
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.format.root import Entry
from raystow.storage.retention.policy import Policy, plan
from raystow.storage.root.delta_chain import needed

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
versions_with_bases = st.lists(st.tuples(st.integers(0, 20), st.sets(small, max_size=2)), max_size=12).map(
    lambda some: [
        difference(id, *sorted(base for base in bases if base < id), stored=stored)
        for id, (stored, bases) in enumerate(some, start=1)
    ]
)


def ids(world: dict[str, Any], **policy: Any) -> set[int]:
    return {decision.entry.id for decision in plan(policy=Policy(**policy), **world) if decision.keep}


def always(world: dict[str, Any]) -> set[int]:
    return {one.id for one in world["entries"]} & {len(world["entries"]), *world["pins"].values()}


@given(worlds, rules)
def test_a_version_is_kept_if_any_rule_keeps_it(world: dict[str, Any], policy: dict[str, Any]) -> None:
    alone = [ids(world, **{name: rule}) for name, rule in policy.items()] or [ids(world)]
    assert ids(world, **policy) == set().union(*alone)


@given(worlds, rules, st.none() | st.integers(1, 200))
def test_newest_and_pinned_versions_are_kept_with_reasons(world: Any, policy: Any, max_bytes: int | None) -> None:
    made = plan(policy=Policy(**policy, max_bytes=max_bytes), **world)
    assert [decision.entry for decision in made] == world["entries"]
    assert always(world) <= {decision.entry.id for decision in made if decision.keep}
    assert all(decision.rules and decision.why for decision in made)


@given(worlds, rules, st.integers(1, 200))
def test_max_bytes_drops_the_oldest_versions_and_no_more(world: Any, policy: Any, max_bytes: int) -> None:
    stored = {one.id: one.stored for one in world["entries"]}
    without, within = ids(world, **policy), ids(world, **policy, max_bytes=max_bytes)
    assert within <= without
    assert sum(stored[id] for id in within) <= max(max_bytes, sum(stored[id] for id in always(world)))
    if lost := without - within:
        assert sum(stored[id] for id in within | {max(lost)}) > max_bytes  # no version is dropped without need
        assert max(lost) < min(within - always(world), default=len(stored) + 1)  # the oldest versions are dropped


@given(versions_with_bases, st.dictionaries(st.sampled_from("abc"), small), st.integers(1, 200))
def test_max_bytes_counts_the_bases_of_kept_versions(entries: list[Entry], pins: dict[str, int], max_bytes: int) -> None:
    world = {"entries": entries, "pins": pins, "metrics": {}}
    always_kept = {*pins.values(), *(one.id for one in entries[-1:])}
    droppable = [one.id for one in entries if one.id not in always_kept]
    for number in range(len(droppable) + 1):
        rest = {one.id for one in entries} - {*droppable[:number]}
        held = rest | needed(entries, rest).keys()
        if sum(one.stored for one in entries if one.id in held) <= max_bytes:
            break
    assert ids(world, max_bytes=max_bytes) == held


@given(worlds, rules, st.integers(1, 12), st.integers(1, 200))
def test_a_weaker_policy_keeps_at_least_as_much(world: Any, policy: dict[str, Any], more: int, max_bytes: int) -> None:
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
def test_a_plan_is_pure_and_idempotent(world: Any, policy: Any, max_bytes: int | None) -> None:
    whole = Policy(**policy, max_bytes=max_bytes)
    before = repr(world)
    made = plan(policy=whole, **world)
    assert made == plan(policy=whole, **world)
    assert repr(world) == before
    rest = [decision.entry for decision in made if decision.keep]
    assert all(decision.keep for decision in plan(rest, whole, pins=world["pins"], metrics=world["metrics"]))


@given(worlds, rules, st.integers(1, 12), st.sets(small))
def test_thinning_drops_no_version_and_skips_the_newest(world: Any, policy: Any, resumable: int, thin: set[int]) -> None:
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
    assert all(decision.verdict == "keep" for decision in again), "an executed plan leaves nothing to do"
