"""What a node keeps in its memory, and what it lets go."""

from __future__ import annotations

import os

import pytest
from pack_memory import opened

from raystow.storage.format import keys
from raystow.workers.memory.memory_tier import Home, MemoryTier, Part

KIB = 1 << 10


def home(id: int, repository: str = "r") -> Home:
    return Home(repository, id, f"{id:016x}")


def read(tier: MemoryTier, key: str, repository: str = "r") -> bytes | None:
    lent = tier.borrow(repository, key)
    if lent is None:
        return None
    with open(lent, "rb") as file:
        return file.read()


def ids(tier: MemoryTier, repository: str = "r") -> list[int]:
    return [holding.home.id for holding in tier.holdings(repository)]


@pytest.fixture
def tier():
    before = opened()
    tier = MemoryTier(10 * KIB)
    yield tier
    tier.close()
    assert tier.used == 0
    assert not opened() - before


def test_objects_come_back_as_they_were(tier):
    assert tier.put(home(1), 0, "a", [b"one", bytearray(b"two"), memoryview(b"three")[1:]]) is not None
    assert tier.put(home(1), 0, "empty", []) is not None
    assert (read(tier, "a"), read(tier, "empty"), read(tier, "b")) == (b"onetwohree", b"", None)
    assert read(tier, "a", "another repository") is None
    (holding,) = tier.holdings("r")
    assert (holding.parts, holding.committed) == ({0: Part({"a": 10, "empty": 0})}, False)


def test_what_was_told_of_holdings_stays_as_it_was(tier):
    tier.put(home(1), 0, "a", [b"one"])
    (before,) = tier.holdings("r")
    before.parts[0].line = ("a node that nobody asked",)
    tier.put(home(1), 0, "b", [b"two"])
    tier.put(home(1), 3, "c", [b"three"], line=("n", "m"))
    tier.committed(home(1))
    assert (before.committed, {number: part.objects for number, part in before.parts.items()}) == (False, {0: {"a": 3}})
    (after,) = tier.holdings("r")
    assert (after.committed, after.parts[0].line, list(after.parts)) == (True, (), [0, 3])


def test_a_version_replaces_the_one_before_and_what_never_became_one(tier):
    for id in (1, 2, 3):
        tier.put(home(id), 0, f"pack {id}", [bytes(KIB)])
    tier.committed(home(1))
    tier.committed(home(3))
    tier.put(home(4), 0, "pack 4", [bytes(KIB)])
    assert ids(tier) == [3, 4]
    tier.given_up(home(4))
    assert (ids(tier), tier.used) == ([3], KIB)


def staged(tier: MemoryTier, id: int, *, size: int = KIB) -> None:
    """All that node 0 makes for an attempt."""
    where = home(id)
    tier.put(where, 0, keys.pack(id, where.attempt, 0, "weights", 0), [bytes(size)])
    tier.put(where, 0, keys.fragment(id, where.attempt, 0), [b"fragment"])


def test_what_was_staged_whole_outlives_its_save_until_there_is_a_newer_version(tier):
    staged(tier, 1)
    tier.put(home(1), 3, "a part that is not whole", [bytes(KIB)])
    tier.given_up(home(1))
    (holding,) = tier.holdings("r")
    assert (holding.whole, set(holding.parts), holding.given_up) == ({0}, {0}, True)
    assert tier.used == KIB + 8
    staged(tier, 2)
    assert ids(tier) == [1, 2]
    tier.committed(home(2))
    assert ids(tier) == [2]


def test_what_others_lean_on_stays_with_them(tier):
    for id in (1, 2, 3):
        staged(tier, id)
        if id > 1:
            tier.lean(home(id), home(1))
        tier.committed(home(id))
    assert ids(tier) == [1, 3]
    tier.lean(home(4), home(1))
    staged(tier, 5)
    tier.committed(home(5))
    assert ids(tier) == [5], "4 came to nothing"
    tier.lean(home(6), home(2))
    assert ids(tier) == [5], "what is not here any more does not come back"
    tier.lean(home(7), home(5))
    staged(tier, 7)
    tier.committed(home(7), alone=True)
    assert ids(tier) == [7], "nothing of it was smaller as a difference"


def test_what_others_lean_on_makes_room_for_the_newest_but_not_for_copies_nor_if_it_is_the_newest(tier, caplog):
    staged(tier, 1, size=4 * KIB)
    tier.committed(home(1))
    tier.lean(home(2), home(1))
    assert tier.put(home(2), 0, "too large", [bytes(7 * KIB)]) is None
    staged(tier, 2, size=3 * KIB)
    tier.committed(home(2))
    tier.lean(home(3), home(1))
    assert tier.put(home(3), 1, "a copy", [bytes(4 * KIB)], line=("b", "a")) is None
    assert ids(tier) == [1, 2, 3]
    staged(tier, 3, size=4 * KIB)
    assert ids(tier) == [2, 3]
    assert tier.holdings("r")[1].whole == {0}
    assert caplog.text.count("nothing is stored as a difference to version 1 from now on") == 1


def test_of_what_was_given_up_only_the_newest_stays(tier):
    for id in (1, 3, 2):
        staged(tier, id)
        tier.given_up(home(id))
    assert ids(tier) == [3]
    tier.put(home(4), 0, "half", [bytes(KIB)])
    tier.given_up(home(4))
    assert ids(tier) == [3]


def test_what_was_given_up_makes_room_for_what_comes(tier):
    staged(tier, 1, size=4 * KIB)
    tier.committed(home(1))
    staged(tier, 2, size=4 * KIB)
    tier.given_up(home(2))
    tier.put(home(3), 1, "a copy", [bytes(KIB)], line=("b", "a"))
    assert ids(tier) == [1, 2, 3]
    tier.put(home(3), 1, "a larger one", [bytes(2 * KIB)], line=("b", "a"))
    assert ids(tier) == [1, 3]
    assert not any(part.short for held in tier.holdings("r") for part in held.parts.values())


def test_a_version_is_not_given_up_by_who_did_not_hear_of_it(tier):
    staged(tier, 1)
    tier.committed(home(1))
    tier.given_up(home(1))
    assert [(held.committed, held.given_up) for held in tier.holdings("r")] == [(True, False)]


def test_the_newest_version_is_not_given_up_for_one_that_may_never_be(tier, caplog):
    tier.put(home(1), 0, "a", [bytes(6 * KIB)])
    tier.committed(home(1))
    assert tier.put(home(2), 0, "b", [bytes(4 * KIB)]) is not None
    assert tier.put(home(2), 3, "c", [bytes(1)]) is None
    assert tier.put(home(2), 3, "d", [bytes(1)]) is None
    assert caplog.text.count("version 2 is not kept whole in memory: 1 bytes more do not fit into 10240") == 1
    assert [(held.home.id, list(held.parts)) for held in tier.holdings("r")] == [(1, [0]), (2, [0, 3])]
    assert [part.short for part in tier.holdings("r")[1].parts.values()] == [False, True]
    tier.committed(home(2))
    assert (ids(tier), tier.used) == ([2], 4 * KIB)


def test_more_versions_are_kept_while_there_is_room():
    tier = MemoryTier(10 * KIB, versions=3)
    for id in range(1, 6):
        tier.put(home(id), 0, f"pack {id}", [bytes(2 * KIB)])
        tier.committed(home(id))
    assert ids(tier) == [3, 4, 5]
    assert tier.put(home(6), 0, "pack 6", [bytes(7 * KIB)]) is not None
    assert ids(tier) == [5, 6]
    tier.resize(0)
    assert ids(tier) == []
    tier.close()


def test_repositories_do_not_replace_each_other(tier):
    tier.put(home(1, "r"), 0, "a", [bytes(KIB)])
    tier.put(home(9, "s"), 0, "a", [b"other"])
    tier.committed(home(1, "r"))
    tier.committed(home(9, "s"))
    assert (ids(tier, "r"), ids(tier, "s")) == ([1], [9])
    assert read(tier, "a", "s") == b"other"


def test_a_repository_that_nobody_saves_to_makes_room(tier):
    for repository in ("r", "s", "t"):
        tier.put(home(1, repository), 0, "a", [bytes(3 * KIB)])
        tier.committed(home(1, repository))
    tier.put(home(2, "r"), 0, "b", [bytes(KIB)])
    assert tier.put(home(3, "t"), 0, "b", [bytes(2 * KIB)]) is not None
    assert (ids(tier, "r"), ids(tier, "s"), ids(tier, "t")) == ([1, 2], [], [1, 3])


def test_what_was_lent_outlives_the_tier():
    tier = MemoryTier(KIB)
    tier.put(home(1), 0, "a", [b"bytes"])
    lent = tier.borrow("r", "a")
    tier.close()
    with open(lent, "rb") as file:
        assert os.pread(file.fileno(), 5, 0) == b"bytes"


def test_an_object_stored_twice_counts_once(tier):
    tier.put(home(1), 0, "a", [bytes(KIB)])
    tier.put(home(1), 0, "a", [bytes(2 * KIB)])
    assert tier.used == 2 * KIB


@pytest.mark.parametrize("over", [True, False])
def test_memory_on_loan_is_another_versions_when_the_loan_is_over(over: bool) -> None:
    tier = MemoryTier(16 * KIB)
    tier.put(home(1), 0, "old", [b"1" * KIB])
    loan = tier.loan("r", "old")
    assert loan is not None
    tier.committed(home(1))
    tier.committed(home(2))
    assert (tier.used, tier.spare) == (0, 4096)
    if over:
        loan.end()
    tier.put(home(3), 0, "new", [b"3" * KIB])
    with open(loan.descriptor, "rb") as file:
        assert file.read() == (b"3" if over else b"1") * KIB
    assert tier.spare == (0 if over else 4096)


def test_the_memory_of_a_version_is_the_next_ones_within_the_budget():
    before, tier = opened(), MemoryTier(2500)
    for id in (1, 2, 3):
        assert tier.put(home(id), 0, f"pack{id}", [bytes([id]) * 1000]) == bytes([id]) * 1000
        tier.committed(home(id))
        assert tier.used == 1000
    assert (opened() - before).total() == 4  # of each its own, and its mapping's
    tier.resize(1500)  # no room for what waits
    assert (opened() - before).total() == 2
    tier.close()
    assert not opened() - before


def read_planes(tier: MemoryTier, of: Home) -> bytes | None:
    lent = tier.loan_planes(of)
    if lent is None:
        return None
    with open(lent.descriptor, "rb") as file:
        lent.end()
        return file.read()


def write_nines(target: memoryview) -> None:
    target[:] = b"9" * len(target)


def test_planes_lie_beside_their_version_and_go_with_it(tier):
    assert not tier.put_planes(home(1), KIB, write_nines), "nothing of it is here"
    staged(tier, 1)
    tier.committed(home(1))
    assert tier.put_planes(home(1), KIB, write_nines)
    assert (tier.planes(home(1)), read_planes(tier, home(1)), tier.used) == (KIB, b"9" * KIB, 2 * KIB + 8)
    assert [held.planes for held in tier.holdings("r")] == [KIB]
    assert not tier.put_planes(home(1), KIB, write_nines), "once is enough"
    staged(tier, 2)
    tier.lean(home(2), home(1))
    tier.committed(home(2))
    assert tier.planes(home(1)) == KIB
    staged(tier, 3)
    tier.committed(home(3))
    assert (ids(tier), tier.used, tier.planes(home(1)), read_planes(tier, home(1))) == ([3], KIB + 8, 0, None)


def test_planes_drive_nothing_out_and_make_room_for_everything(tier, caplog):
    staged(tier, 1, size=6 * KIB)
    tier.committed(home(1))
    assert not tier.put_planes(home(1), 4 * KIB, write_nines)
    assert (ids(tier), tier.used) == ([1], 6 * KIB + 8)
    assert tier.put_planes(home(1), 3 * KIB, write_nines)
    tier.put(home(2), 1, "a copy", [bytes(2 * KIB)], line=("b", "a"))
    assert (tier.planes(home(1)), tier.used) == (0, 8 * KIB + 8)
    assert tier.put_planes(home(1), KIB, write_nines)
    staged(tier, 2, size=KIB)
    assert (ids(tier), tier.planes(home(1)), tier.used) == ([1, 2], 0, 9 * KIB + 16)
    assert caplog.text.count("GPUs decode planes of version 1 from now on") == 2
    assert [held.planes for held in tier.holdings("r")] == [0, 0]


def test_planes_of_a_version_that_goes_meanwhile_go_as_well(tier):
    def write(target: memoryview) -> None:
        staged(tier, 2)
        tier.committed(home(2))

    staged(tier, 1)
    tier.committed(home(1))
    assert not tier.put_planes(home(1), KIB, write)
    assert (ids(tier), tier.used) == ([2], KIB + 8)
    with pytest.raises(ZeroDivisionError):
        tier.put_planes(home(2), KIB, lambda target: 1 / 0)
    assert (tier.planes(home(2)), tier.used) == (0, KIB + 8)
