"""Rows of differences: how long they get, by what their versions have stored, and when there are none for a while."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from raystow.orchestrator.coordinator.delta_schedule import AUTO, LONGEST, DeltaGroup, after
from raystow.storage.format.root import Entry


def entry(id: int, stored: int, *bases: int) -> Entry:
    return Entry(id, f"{id:016x}", "", 0, id, 0.0, 1200, stored, bases)


def played(
    whole: int, differences: Iterable[int], number: int, *, row: DeltaGroup | None = None
) -> tuple[list[bool], DeltaGroup]:
    """Save ``number`` versions with "auto": whole ones take ``whole`` bytes, those of a row ``differences`` one after another.
    Which of them are differences."""
    row, sizes, found = after(row, entry(1, whole), None), list(differences), [False]
    for id in range(2, number + 1):
        goes_on, _ = row.goes_on(AUTO)
        found.append(goes_on)
        if goes_on:
            row = row.begun()
            row = row.with_delta(entry(id, sizes[len(row.stored)], row.whole.id))
        else:
            row = after(row, entry(id, whole), None)
    return found, row


def test_a_delta_group_ends_when_a_delta_exceeds_the_mean() -> None:
    """Means: 1000, 800, 733, 725; the fourth would take about 780."""
    found, row = played(1000, [600, 600, 700, 800, 900], 9)
    assert found == [False, True, True, True, False, True, True, True, False]
    assert row.misses == 0


def test_the_row_that_it_makes_is_the_cheapest() -> None:
    sizes = [500 + 40 * i for i in range(20)]
    means = [(1000 + sum(sizes[:i])) / (1 + i) for i in range(20)]
    found, _ = played(1000, sizes, 20)
    assert found.index(False, 1) - 1 == means.index(min(means))


def test_a_row_of_equal_differences_has_a_bound() -> None:
    found, _ = played(1000, [700] * 99, LONGEST + 2)
    assert found == [False, *[True] * LONGEST, False]
    assert played(1000, [700] * 99, LONGEST + 1)[1].goes_on(AUTO) == (False, "after 16 deltas")


def test_deltas_are_tried_less_often_if_they_do_not_pay() -> None:
    row, named = after(None, entry(1, 1000), None), list[int]()
    for id in range(2, 40):
        goes_on, _ = row.goes_on(AUTO)
        named += [id] * goes_on
        row, base = (row.begun(), row.whole) if goes_on else (row, None)
        row = after(row, entry(id, 1000), base)
    assert named == [2, 3, 5, 9, 17, 33]


def test_retries_of_deltas_back_off() -> None:
    found, _ = played(1000, [960] * 99, 80)
    tried = [number for number, difference in enumerate(found, 1) if difference]
    assert tried == [2, 4, 7, 12, 21, 38, 55, 72], "after 1, 1, 2, 4, 8, 16 whole ones, and 16 ever after"
    assert "did not pay" in played(1000, [960] * 99, 60)[1].goes_on(AUTO)[1]


def test_after_one_that_paid_they_are_tried_at_once_again() -> None:
    _, row = played(1000, [960] * 99, 21)
    assert row.misses == 5
    _, row = played(1000, [700] * 99, 40, row=row)
    assert row.misses == 0
    assert not row.pause


def test_a_delta_that_is_stored_whole_is_one_miss() -> None:
    """A node worker was restarted, or the world has another size."""
    first = after(None, entry(1, 1000), None)
    second = after(first.begun(), entry(2, 1000), first.whole)
    assert (second.misses, second.pause, second.goes_on(AUTO)[0]) == (1, 0, True)
    late = after(second.begun(), entry(3, 1000), first.whole)
    assert late.misses == 1, "it was begun against another"
    row = second.begun().with_delta(entry(3, 600, 2))
    assert row.misses == 0
    assert after(row.begun(), entry(4, 1000), row.whole).misses == 0, "in the midst of a row it says nothing of what pays"


def test_a_difference_to_the_row_before_does_not_count() -> None:
    row = after(None, entry(2, 1000), None)
    assert row.with_delta(entry(3, 500, 1)) == row


def test_what_is_asked_for_by_number_depends_on_the_number_alone() -> None:
    row = after(None, entry(1, 1000), None)
    for number in (1, 2):
        assert row.goes_on(2) == (True, f"number {number} of 2")
        row = row.begun().with_delta(entry(1 + number, 5000, 1))
    assert row.goes_on(2) == (False, "after 2 deltas")


@pytest.mark.parametrize("whole", [0, 1])
def test_versions_of_no_bytes(whole: int) -> None:
    found, _ = played(whole, [0] * 99, 5)
    assert found == [False, True, True, True, True]
