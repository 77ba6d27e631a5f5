"""The choice of the thinned versions that become deltas: chains stay within the limit, and no version is kept only for a
chain.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.errors import StateError
from raystow.storage.format.root import Entry
from raystow.storage.limits import MAX_CHAIN
from raystow.storage.retention.policy import Policy, plan
from raystow.storage.retention.thin_policy import MOST, chained
from raystow.storage.root.delta_chain import base_chain, depths


def entry(id: int, *bases: int, thin: bool = False) -> Entry:
    return Entry(id, f"{id:016x}", "00", 1, 10 * id, 0.0, 20, 10, bases, ("weights",) if thin else ())


def chain(entries: list[Entry], policy: Policy, **how: object) -> dict[int, int | None]:
    decisions = plan(entries, policy, pins={}, metrics={}, **how)  # type: ignore[arg-type]
    return {one.entry.id: one.base for one in decisions if one.thin}


def test_a_policy_with_a_longer_chain_is_refused() -> None:
    assert Policy(resumable=1, delta=MOST).delta == MOST < MAX_CHAIN - 1, "the newest version may be a delta until it is thinned"
    with pytest.raises(StateError, match=f"delta is {MOST + 1}"):
        Policy(resumable=1, delta=MOST + 1)


def test_a_chain_continues_after_its_last_version() -> None:
    entries = [entry(1, thin=True), entry(2, 1, thin=True), entry(3), entry(4), entry(5)]
    assert chain(entries, Policy(resumable=1, delta=2)) == {3: 2, 4: None}
    assert chain(entries, Policy(resumable=1, delta=5)) == {3: 2, 4: 3}
    assert chain(entries, Policy(resumable=1)) == {3: None, 4: None}


def test_a_base_of_a_thinned_version_is_not_rounded() -> None:
    """It is rounded if the thinned version is dropped."""
    entries = [entry(1), entry(2, 1, thin=True), entry(3), entry(4)]
    metrics = {1: {"loss": 1.0}, 2: {"loss": 2.0}}
    for best, bits in ((1, {1: 4, 3: 4}), (2, {1: None, 3: 4})):
        policy = Policy(keep_last=2, keep_best=("loss", "min", best), resumable=1, mantissa_bits=4)
        made = plan(entries, policy, pins={}, metrics=metrics)
        assert {decision.entry.id: decision.mantissa_bits for decision in made if decision.thin} == bits


def test_the_chain_length_includes_later_deltas() -> None:
    """Version 4 and version 5 are thinned although older versions are not, since an earlier thinning was interrupted."""
    entries = [entry(1), entry(2), entry(3), entry(4, 3, thin=True), entry(5, 4, thin=True), entry(6)]
    assert chain(entries, Policy(resumable=1, delta=3)) == {1: None, 2: 1, 3: None}
    assert chain(entries, Policy(resumable=1, delta=4)) == {1: None, 2: 1, 3: 2}


def test_a_version_that_is_not_thinned_is_no_delta_base() -> None:
    decisions = plan([entry(id) for id in range(1, 5)], Policy(resumable=1, delta=3), pins={"good": 2}, metrics={})
    assert [(one.verdict, one.base) for one in decisions] == [("thin", None), ("keep", None), ("thin", 1), ("keep", None)]


def test_base_chain_ends_at_a_whole_or_missing_version() -> None:
    entries = {one.id: one for one in (entry(1), entry(2, 1), entry(3, 2), entry(5, 4), entry(6, 7))}
    assert [[one.id for one in base_chain(entries, of)] for of in entries.values()] == [[1], [2, 1], [3, 2, 1], [5], [6]]


@given(st.data())
def test_chains_are_bounded_and_each_base_is_kept_by_a_rule(data: st.DataObject) -> None:
    entries: list[Entry] = []
    for id in range(1, data.draw(st.integers(1, 12)) + 1):
        thin = data.draw(st.booleans())
        bases = [one.id for one in entries if depths(entries)[one.id] <= MOST and (not one.resumable or not thin)]
        some = (data.draw(st.sampled_from(bases)),) if bases and data.draw(st.booleans()) else ()
        entries.append(entry(id, *some, thin=thin))
    full = [one.id for one in entries if one.resumable]
    needed = {base for one in entries if one.resumable for base in one.bases}
    thin = data.draw(st.sets(st.sampled_from(full))) - needed if full else set()
    ruled = data.draw(st.sets(st.sampled_from([one.id for one in entries])))
    most = data.draw(st.integers(1, MOST))
    found = chained(entries, thin, ruled, most)
    assert found.keys() <= thin
    assert set(found.values()) <= ruled
    after = [
        entry(one.id, *([found[one.id]] if one.id in found else []), thin=True) if one.id in thin else one for one in entries
    ]
    by_id = {one.id: one for one in after}
    for id, base in found.items():
        assert base < id
        assert not by_id[base].resumable
        longest = max(depths(after)[one.id] for one in after if id in {of.id for of in base_chain(by_id, one)})
        assert longest - 1 <= most
    assert max(depths(after).values()) <= MAX_CHAIN
