"""Groups of deltas to one base: their length, which depends on the stored bytes, and the pauses without deltas."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from raystow.orchestrator.coordinator.delta_schedule import AUTO, LONGEST, DeltaGroup, after
from raystow.storage.format.root import Entry


def entry(id: int, stored: int, *bases: int) -> Entry:
    return Entry(id, f"{id:016x}", "", 0, id, 0.0, 1200, stored, bases)


def simulate(
    whole: int, differences: Iterable[int], number: int, *, group: DeltaGroup | None = None
) -> tuple[list[bool], DeltaGroup]:
    """Save ``number`` versions with delta="auto". Return whether each version was a delta, and the last group. A whole version
    takes ``whole`` bytes; the deltas of a group take ``differences`` in order.
    """
    group, sizes, found = after(group, entry(1, whole), None), list(differences), [False]
    for id in range(2, number + 1):
        goes_on, _ = group.goes_on(AUTO)
        found.append(goes_on)
        if goes_on:
            group = group.begun()
            group = group.with_delta(entry(id, sizes[len(group.stored)], group.whole.id))
        else:
            group = after(group, entry(id, whole), None)
    return found, group


def test_a_delta_group_ends_when_a_delta_exceeds_the_mean() -> None:
    """The means are 1000, 800, 733, and 725; the next delta would take about 780."""
    found, group = simulate(1000, [600, 600, 700, 800, 900], 9)
    assert found == [False, True, True, True, False, True, True, True, False]
    assert group.misses == 0


def test_a_delta_group_ends_at_the_lowest_mean_size() -> None:
    sizes = [500 + 40 * i for i in range(20)]
    means = [(1000 + sum(sizes[:i])) / (1 + i) for i in range(20)]
    found, _ = simulate(1000, sizes, 20)
    assert found.index(False, 1) - 1 == means.index(min(means))


def test_a_group_of_equal_deltas_has_a_maximum_length() -> None:
    found, _ = simulate(1000, [700] * 99, LONGEST + 2)
    assert found == [False, *[True] * LONGEST, False]
    assert simulate(1000, [700] * 99, LONGEST + 1)[1].goes_on(AUTO) == (False, "after 16 deltas")


def test_deltas_are_tried_less_often_if_they_do_not_pay() -> None:
    group, named = after(None, entry(1, 1000), None), list[int]()
    for id in range(2, 40):
        goes_on, _ = group.goes_on(AUTO)
        named += [id] * goes_on
        group, base = (group.begun(), group.whole) if goes_on else (group, None)
        group = after(group, entry(id, 1000), base)
    assert named == [2, 3, 5, 9, 17, 33]


def test_retries_of_deltas_back_off() -> None:
    found, _ = simulate(1000, [960] * 99, 80)
    tried = [number for number, difference in enumerate(found, 1) if difference]
    assert tried == [2, 4, 7, 12, 21, 38, 55, 72], "after 1, 1, 2, 4, 8, 16 whole versions, and then always 16"
    assert "did not pay" in simulate(1000, [960] * 99, 60)[1].goes_on(AUTO)[1]


def test_a_delta_that_pays_ends_the_backoff() -> None:
    _, group = simulate(1000, [960] * 99, 21)
    assert group.misses == 5
    _, group = simulate(1000, [700] * 99, 40, group=group)
    assert group.misses == 0
    assert not group.pause


def test_a_delta_that_is_stored_whole_is_one_miss() -> None:
    """This happens if a node worker was restarted or the world size changed."""
    first = after(None, entry(1, 1000), None)
    second = after(first.begun(), entry(2, 1000), first.whole)
    assert (second.misses, second.pause, second.goes_on(AUTO)[0]) == (1, 0, True)
    late = after(second.begun(), entry(3, 1000), first.whole)
    assert late.misses == 1, "its base is not that of the current group"
    group = second.begun().with_delta(entry(3, 600, 2))
    assert group.misses == 0
    assert after(group.begun(), entry(4, 1000), group.whole).misses == 0, "a whole version within a group is no miss"


def test_a_delta_to_an_older_base_is_ignored() -> None:
    group = after(None, entry(2, 1000), None)
    assert group.with_delta(entry(3, 500, 1)) == group


def test_a_fixed_delta_count_ignores_sizes() -> None:
    group = after(None, entry(1, 1000), None)
    for number in (1, 2):
        assert group.goes_on(2) == (True, f"number {number} of 2")
        group = group.begun().with_delta(entry(1 + number, 5000, 1))
    assert group.goes_on(2) == (False, "after 2 deltas")


@pytest.mark.parametrize("whole", [0, 1])
def test_versions_without_bytes_form_groups(whole: int) -> None:
    found, _ = simulate(whole, [0] * 99, 5)
    assert found == [False, True, True, True, True]
