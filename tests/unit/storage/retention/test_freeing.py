"""The choice of delta versions to compact: a version is compacted if that frees more bytes than it writes and no rule forbids
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.format.root import Entry
from raystow.storage.retention.policy import Decision, Policy, plan


def entry(id: int, *bases: int, stored: int = 100) -> Entry:
    return Entry(id, f"{id:016x}", "00", 1, 100 * id, 0.0, 200, stored if not bases else stored * 7 // 10, bases)


VERSIONS = [entry(1), *(entry(id, 1) for id in range(2, 8)), entry(8), entry(9, 8)]
"""Two groups of versions with one base each: seven versions and two versions."""


def decided(
    policy: Policy, entries: Sequence[Entry] = VERSIONS, pins: Mapping[str, int] | None = None, **how: object
) -> dict[int, Decision]:
    decisions = plan(entries, policy, pins=pins or {}, metrics={}, compact=True, **how)  # type: ignore[arg-type]
    return {decision.entry.id: decision for decision in decisions}


def reasons(policy: Policy, **how: object) -> dict[int, str]:
    return {id: f"{one.verdict}: {one.why}" for id, one in decided(policy, **how).items() if one.verdict != "drop" or id == 1}  # type: ignore[arg-type]


NEWEST = {8: "keep: base of version 9: version 9 is the newest", 9: "keep: newest, last 1"}


def test_the_last_delta_is_compacted_and_its_base_dropped() -> None:
    assert reasons(Policy(keep_last=1), pins={"best": 5}) == {
        1: "drop: no rule keeps it once version 5 is written whole",
        5: "compact: pinned as best; written whole, so that version 1 can go",
        **NEWEST,
    }


def test_compaction_pays_for_two_deltas_but_not_for_four() -> None:
    """A whole version takes 100 bytes, a delta 70; deltas also need their base of 100 bytes."""
    pins = {"a": 2, "b": 3, "c": 4, "d": 5}
    assert (
        reasons(Policy(keep_last=1), pins={"a": 2, "b": 3})[1]
        == "drop: no rule keeps it once version 3 and 1 more are written whole"
    )
    kept = reasons(Policy(keep_last=1), pins=pins)
    assert kept[1] == ("keep: base of version 5 and 3 more: to write them whole takes about 400 bytes, and would free 380")
    assert kept[2] == "keep: pinned as a"


def test_a_base_that_a_rule_keeps_stays_with_its_deltas() -> None:
    kept = reasons(Policy(keep_last=1), pins={"best": 5, "first": 1})
    assert (kept[1], kept[5]) == ("keep: pinned as first, base of version 5", "keep: pinned as best")
    assert reasons(Policy(keep_last=1), pins={"best": 5}, bases=[1])[1] == "keep: base of a save under way, base of version 5"


def test_a_version_that_may_not_be_replaced_keeps_its_base() -> None:
    kept = reasons(Policy(keep_last=1), pins={"best": 5}, verified=3)
    assert kept[1] == "keep: base of version 5 and 1 more: version 3 was verified last"
    kept = reasons(Policy(keep_last=1), pins={"best": 5}, leased={(3, f"{3:016x}")})
    assert kept[1] == "keep: base of version 5 and 1 more: version 3 is being read under a lease"
    assert "version 3 is thinned first" in reasons(Policy(keep_every=400, resumable=1))[1]


def test_a_version_that_is_dropped_soon_is_not_compacted() -> None:
    row = [entry(1), entry(2, 1), entry(3, 1), entry(4)]
    kept = reasons(Policy(keep_last=2), entries=row)
    assert kept[1] == "keep: base of version 3: version 3 is kept as one of the last 2 only"
    assert reasons(Policy(keep_last=2, keep_every=300), entries=[*row, entry(5)])[1].startswith("drop: ")


def test_a_chain_is_dropped_after_its_last_is_compacted() -> None:
    chain = [entry(1), entry(2, 1), entry(3, 2), entry(4)]
    decisions = decided(Policy(keep_last=1), chain, {"best": 3})
    assert [one.verdict for one in decisions.values()] == ["drop", "drop", "compact", "keep"]
    assert decisions[1].why == "no rule keeps it once what needs those that need it is written whole"


def test_the_bytes_of_a_chain_are_summed() -> None:
    chain = [entry(1), entry(2, 1, stored=30), entry(3, 2, stored=30), entry(4, 3, stored=30), entry(5)]
    decisions = decided(Policy(keep_last=1), chain, {"best": 3})
    assert [one.verdict for one in decisions.values()] == ["drop", "drop", "compact", "drop", "keep"]
    decisions = decided(Policy(keep_last=1), chain, {"best": 4, "first": 1})
    assert [one.verdict for one in decisions.values()] == ["keep"] * 5
    assert decisions[3].why == "base of version 4: to write them whole takes about 100 bytes, and would free 63"
    assert decisions[2].why == "base of version 3: version 3 is kept for others only"


def test_compaction_is_off_by_default() -> None:
    decisions = plan(VERSIONS, Policy(keep_last=1), pins={"best": 5}, metrics={})
    assert {one.verdict for one in decisions} == {"keep", "drop"}


@given(st.data())
def test_kept_versions_never_lose_their_bases(data: st.DataObject) -> None:
    entries: list[Entry] = []
    for id in range(1, data.draw(st.integers(1, 9)) + 1):
        wholes = [entry.id for entry in entries if not entry.bases]
        bases = (data.draw(st.sampled_from(wholes)),) if wholes and data.draw(st.booleans()) else ()
        entries.append(entry(id, *bases, stored=data.draw(st.integers(1, 200))))
    ids = [entry.id for entry in entries]
    policy = Policy(keep_last=data.draw(st.integers(1, 4)), keep_every=data.draw(st.sampled_from([None, 300])))
    pins = data.draw(st.dictionaries(st.sampled_from("ab"), st.sampled_from(ids)))
    how = {"verified": data.draw(st.sampled_from([0, *ids])), "bases": data.draw(st.sets(st.sampled_from(ids), max_size=1))}
    before = {d.entry.id: d for d in plan(entries, policy, pins=pins, metrics={}, **how)}  # type: ignore[arg-type]
    after = decided(policy, entries, pins, **how)
    kept = {id for id, one in after.items() if one.keep}
    assert {id for id, one in before.items() if one.keep and one.rules[0][:15] != "base of version"} <= kept
    assert kept <= {id for id, one in before.items() if one.keep}
    assert all(set(after[id].entry.bases) <= kept for id in kept if not after[id].compact)
    assert all(after[id].entry.bases[0] not in kept for id in kept if after[id].compact), "otherwise compaction frees nothing"
