"""Rounds of restores: all ranks take one version, fall back together, and nobody waits for ever."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock
from handmade import empty_record

from raystow.orchestrator.known import Known
from raystow.orchestrator.restoring import Choice, Round, Rounds, Vote
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import ClusterError, Damaged, DeadlineExceeded, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.format.root import Entry
from raystow.storage.repository import create_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore


class World:
    """Two ranks, and as many versions as are committed."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.repository = create_repository(f"memory://restoring-{SYSTEM.token()}", clock=self.clock)
        self.committer = Committer(self.repository, "me")
        self.damaged: list[int] = []
        self.known = Known(self.repository)
        self.rounds = Rounds(self.repository, self.clock, self.known, on_fall_back=lambda: self.damaged.append(1))

    def commit(self, steps: int) -> list[Entry]:
        return [self.committer.commit(empty_record(self.committer, step)).entry for step in range(steps)]

    def vote(
        self,
        rank: int,
        tried: Entry | None = None,
        damage: str = "",
        *,
        number: int = 1,
        process: str = "a",
        error: str = "",
        read: dict[str, int] | None = None,
    ) -> Round:
        return self.rounds.vote(Vote(rank, 2, f"{process}{rank}", number, 60.0, tried, damage, error, read=read or {}))

    def leases(self) -> list[tuple[int, str] | None]:
        return [keys.leased(info.key) for info in self.repository.store.list(keys.LEASES)]


@pytest.fixture
def world() -> World:
    return World()


def test_an_empty_repository_has_nothing_to_restore(world):
    assert world.vote(0).answer(None) is None
    assert world.vote(1).answer(None) is None


def test_a_commit_between_two_ranks_does_not_part_them(world):
    (old,) = world.commit(1)
    assert world.vote(0).answer(None) == old
    (new,) = world.commit(1)
    first, second = world.vote(0, old), world.vote(1)
    assert second.answer(None) == old
    assert not first.answers(old)  # until the other has restored it, too
    world.vote(1, old)
    assert first.answers(old)
    assert first.answer(old) == old
    assert world.vote(0, number=2).answer(None) == new


def test_nobody_begins_before_all_have_come_and_then_all_know_where_they_are(world):
    (entry,) = world.commit(1)
    round = world.rounds.vote(Vote(0, 3, "a0", 1, 60.0, node="node b"))
    world.rounds.vote(Vote(1, 3, "a1", 1, 60.0, node="node b"))
    changes = world.rounds.changes
    assert not round.answers(None)
    world.rounds.vote(Vote(2, 3, "a2", 1, 60.0, node="node a"))
    assert round.answers(None)
    assert world.rounds.changes > changes
    assert round.company.nodes == ["node a", "node b"]
    for rank in range(3):
        world.rounds.vote(Vote(rank, 3, f"a{rank}", 1, 60.0, entry))
    again = world.rounds.vote(Vote(0, 3, "a0", 2, 60.0, node="node c"))
    assert not again.answers(None)
    for rank in (1, 2):
        world.rounds.vote(Vote(rank, 3, f"a{rank}", 2, 60.0, node="node c"))
    assert again.company.nodes == ["node c"]
    assert again.company.round != round.company.round


def test_who_never_comes_is_named_too(world):
    world.commit(1)
    round = world.vote(0)
    world.clock.time += 61
    world.rounds.tick()
    assert round.answers(None)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\]"):
        round.answer(None)


def test_all_fall_back_if_one_finds_damage(world, caplog):
    _, older, newest = world.commit(3)
    first, _ = world.vote(0), world.vote(1)
    world.vote(0, newest)
    world.vote(1, newest, "versions/3/weights.pack: the object is cut")
    assert first.answers(newest)
    assert first.answer(newest) == older
    assert "VERSION 3 (step 2) IS DAMAGED, falling back to version 2 (step 1): rank 1: versions/3/weights.pack" in caplog.text
    for rank in range(2):
        assert world.vote(rank, older).answer(older) == older
    assert first.done
    assert len(world.damaged) == 1


def test_what_is_whole_and_holds_too_little_is_passed_over_and_not_counted_as_damaged(world, caplog):
    """Damage that one rank finds counts, whatever others say; and what was found in one version says nothing of the next."""
    last, middle, newest = world.commit(3)
    first, _ = world.vote(0), world.vote(1)

    def say(rank, entry, damage, whole):
        world.rounds.vote(Vote(rank, 2, f"a{rank}", 1, 60.0, entry, damage, whole=whole))

    say(0, newest, "it is cut", False)
    say(1, newest, "it was thinned", True)
    assert (first.answer(newest), len(world.damaged)) == (middle, 1)
    say(0, middle, "it was thinned", True)
    say(1, middle, "", True)
    assert (first.answer(middle), len(world.damaged)) == (last, 1)
    assert "version 2 (step 1) holds too little, falling back to version 1 (step 0): rank 0: it was thinned" in caplog.text
    assert caplog.text.count("IS DAMAGED") == 1
    say(0, last, "it was thinned", True)
    say(1, last, "it was thinned", True)
    with pytest.raises(Damaged, match="no version is whole and holds all that is asked for; the last, 1: rank 0"):
        first.answer(last)


def test_if_nothing_is_whole_everyone_hears_so(world):
    (only,) = world.commit(1)
    world.vote(0), world.vote(1)
    world.vote(0, only)
    round = world.vote(1, only, "it is cut")
    assert round.answers(only)
    with pytest.raises(Damaged, match="no version is whole; the last, 1: rank 1: it is cut"):
        round.answer(only)


def test_what_is_being_restored_is_leased(world):
    old, new = world.commit(2)
    world.vote(0)
    assert world.leases() == [(new.id, new.attempt)]
    world.vote(1)
    for rank in range(2):
        world.vote(rank, new, "damaged")
    assert world.leases() == [(old.id, old.attempt)]
    assert world.repository.plan_retention(Policy(keep_last=1)).dropped == ()
    for rank in range(2):
        world.vote(rank, old)
    assert world.leases() == []


def test_a_rank_that_gives_up_ends_it_for_all(world):
    (entry,) = world.commit(1)
    world.vote(0), world.vote(1)
    waiting = world.vote(0, entry)
    world.vote(1, error="into: names do not match")
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        waiting.answer(entry)
    assert world.leases() == []


def test_a_rank_that_is_busy_meanwhile_hears_it_with_its_next_word(world):
    (entry,) = world.commit(1)
    world.vote(0), world.vote(1)
    world.vote(1, error="into: names do not match")
    round = world.vote(0, entry)
    assert round.answers(entry)
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        round.answer(entry)
    assert not world.vote(0, number=2).answers(None), "the next restore is another one"


def test_a_rank_that_was_not_told_yet_tries_for_itself(world):
    """What keeps another from restoring may keep it too, and then its own error says more."""
    (entry,) = world.commit(1)
    untold = world.vote(0)
    world.vote(1), world.vote(1, error="into: names do not match")
    assert untold.answers(None)
    assert untold.answer(None) == entry
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        world.vote(0, entry).answer(entry)


@pytest.mark.parametrize("again", [{"process": "b"}, {"number": 2}])
def test_a_rank_that_begins_again_ends_what_the_others_wait_for(world, again):
    (entry,) = world.commit(1)
    old = world.vote(1, world.vote(1).answer(None))
    world.vote(0)
    new = world.vote(0, **again)
    assert old.answers(entry)
    with pytest.raises(ClusterError, match="rank 0 has begun another restore"):
        old.answer(entry)
    assert new.answer(None) == entry


def test_a_restarted_process_ends_the_round_of_its_former_one(world):
    world.commit(1)
    round = world.vote(0)
    world.rounds.left(0, "a0")
    assert not round.failure
    world.rounds.left(0, "b0")
    with pytest.raises(ClusterError, match="rank 0 was restarted"):
        round.answer(None)


def test_a_rank_that_never_comes_is_named_after_the_deadline(world):
    (entry,) = world.commit(1)
    round = world.vote(0, world.vote(0).answer(None))
    world.clock.time += 59
    world.rounds.tick()
    assert not round.answers(entry)
    world.clock.time += 2
    world.rounds.tick()
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\]"):
        round.answer(entry)


def test_another_world_size_ends_the_old_round(world):
    world.commit(1)
    round = world.vote(0)
    world.rounds.vote(Vote(0, 3, "b0", 1, 60.0))
    with pytest.raises(ClusterError, match="world size changed from 2 to 3"):
        round.answer(None)


def in_memory(world: World) -> Choice:
    record = empty_record(world.committer, 9)
    return Choice(record.entry(b"digest", 7), {0: ["node"]}, record.dump())


def test_a_save_in_memory_comes_before_the_newest_version(world):
    (newest,) = world.commit(1)
    held = in_memory(world)
    round = world.rounds.vote(Vote(0, 2, "a0", 1, 60.0), held)
    assert round.answer(None) == held.entry
    assert world.vote(1).answer(None) == held.entry  # though nothing is held any more when the second rank asks
    assert world.leases() == []
    world.vote(0, held.entry)
    assert world.vote(1, held.entry, "the pack is missing").answer(held.entry) == newest
    assert world.leases() == [(newest.id, newest.attempt)]


def test_only_for_who_wants_it_and_only_if_it_is_newer(world):
    held = in_memory(world)
    (newest,) = world.commit(1)
    assert world.rounds.vote(Vote(0, 2, "a0", 1, 60.0), held).answer(None) == newest
    held = in_memory(world)
    assert world.rounds.vote(Vote(0, 2, "a0", 2, 60.0, allow_uncommitted=False), held).answer(None) == newest
    assert world.rounds.vote(Vote(0, 2, "a0", 3, 60.0), held).answer(None) == held.entry


def test_without_the_store_what_is_known_is_restored_and_not_leased(world, monkeypatch):
    (old,) = world.commit(1)
    assert world.vote(0).answer(None) == old
    (new,) = world.commit(1)
    world.known.committed(new)

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="root.json")

    def put(self: MemoryStore, key: str, parts: object) -> None:
        raise AssertionError(f"{key} is waited for in vain, for minutes")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "get_tagged", down)
        patch.setattr(MemoryStore, "put", put)
        round = world.vote(0, number=2)
        assert round.answer(None) == new
        world.vote(1)
        world.vote(0, new, number=2)
        world.vote(1, new, "a pack is missing")
        assert round.answer(new) == old


def test_a_restore_is_told_once_with_what_all_ranks_have_read(world):
    old, new = world.commit(2)
    world.vote(0)
    world.vote(1)
    world.clock.time += 2
    world.vote(0, new, "a flipped bit", read={"store": 1000})
    world.vote(1, new, read={"store": 1000})  # of a version that was not restored in the end
    world.vote(0, old, read={"memory": 7, "store": 5})
    assert world.rounds.restored() == []  # not before all have it
    world.vote(1, old, read={"store": 5})
    (told,) = world.rounds.restored()
    assert (told.version, told.step, told.ranks, told.read) == (old.id, old.step, 2, {"memory": 7, "store": 10})
    assert (told.at, told.seconds) == (world.clock.now(), 2)
    assert world.rounds.restored() == []
