"""The coordinator's state machine, stepped by hand: who belongs to which attempt, and what ends one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fake_clock import FakeClock

from raystow.orchestrator.coordinator import Coordinator, Phase
from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import Fenced, SaveFailed, StoreUnavailable
from raystow.storage.format.version_record import FragmentInfo, RestoreInfo
from raystow.storage.repository import create_repository
from raystow.workers.port import Begin, Ticket


@dataclass
class World:
    core: Coordinator
    committer: Committer
    clock: FakeClock

    def begin(
        self,
        rank: int,
        step: int = 1,
        *,
        process: str = "a",
        world: int = 2,
        save: int = 1,
        replicated: int = 7,
        delta: int = 0,
    ) -> Ticket:
        expected = replicated if rank == 0 else 0
        begin = Begin(rank, world, f"{process}{rank}", save, f"node-{rank % 2}", step, 60.0, replicated, expected, delta=delta)
        return self.core.begin(begin)

    def phase(self, ticket: Ticket) -> Phase:
        return self.core.attempt(ticket).phase

    def reason(self, ticket: Ticket) -> str:
        return self.core.attempt(ticket).reason

    def seal(self, tickets: list[Ticket], bases: tuple[int, ...] = ()) -> None:
        for rank, ticket in enumerate(tickets):
            self.core.finished(ticket, rank, 7 if rank == 0 else 0)
        for ticket in tickets:
            self.core.fragment(ticket, FragmentInfo(ticket.node, 0, "", (ticket.node,), 0, 0, 0, bases=bases), [])

    def both(self, step: int, *, delta: int = 0) -> list[Ticket]:
        return [self.begin(rank, step, save=step, delta=delta) for rank in range(2)]

    def commit(self) -> None:
        while (attempt := self.core.next_commit()) is not None:
            self.core.settled(attempt, self.committer.commit(self.core.record(attempt)).entry)


@pytest.fixture
def world() -> World:
    clock = FakeClock()
    committer = Committer(create_repository(f"memory://coordinator-{SYSTEM.token()}", clock=clock), "test")
    core = Coordinator(committer, clock, writer={})
    for rank in range(2):
        core.join(rank, f"a{rank}", 2)
    return World(core, committer, clock)


def test_two_ranks_make_a_version(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    assert tickets[0].attempt == tickets[1].attempt
    assert [ticket.node for ticket in tickets] == [0, 1]
    world.seal(tickets)
    assert world.phase(tickets[0]) is Phase.READY
    world.commit()
    assert world.phase(tickets[0]) is Phase.COMMITTED
    assert [version.id for version in world.committer.repository.versions()] == [1]


def test_versions_come_in_the_order_of_saves(world: World) -> None:
    first, second = [world.begin(0, 1), world.begin(1, 1)], [world.begin(0, 2, save=2), world.begin(1, 2, save=2)]
    world.seal(second)
    assert world.core.next_commit() is None
    world.core.failed(first[0], "a disk is full")
    world.commit()
    assert [version.step for version in world.committer.repository.versions()] == [2]


def test_a_rank_saves_one_step_twice(world: World) -> None:
    first, second = world.begin(0, save=1), world.begin(0, save=2)
    assert first.attempt != second.attempt
    assert world.begin(1, save=1).attempt == first.attempt
    assert world.begin(1, save=2).attempt == second.attempt


def test_a_call_made_twice_counts_once(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    assert world.begin(0) == tickets[0]
    world.seal(tickets)
    world.core.fragment(tickets[0], FragmentInfo(0, 0, "", (0,), 0, 0, 0), [])
    world.commit()
    assert len(world.committer.repository.versions()) == 1


def test_a_fragment_told_again_after_the_commit_is_no_error(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    world.seal(tickets)
    world.commit()
    world.core.fragment(tickets[0], FragmentInfo(0, 0, "", (0,), 0, 0, 0), [])
    assert world.phase(tickets[0]) is Phase.COMMITTED


def test_only_what_someone_may_wait_for_counts_as_a_change(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    world.core.finished(tickets[0], 0, 7)
    assert world.core.changes == 0
    world.core.finished(tickets[1], 1, 0)
    assert (world.core.changes, world.phase(tickets[0])) == (1, Phase.SEALING)
    world.core.fragment(tickets[0], FragmentInfo(0, 0, "", (0,), 0, 0, 0), [])
    assert world.core.changes == 1


def test_a_restarted_rank_ends_what_waited_for_its_former_process(world: World) -> None:
    ticket = world.begin(0)
    world.core.join(1, "b1")
    assert (world.phase(ticket), world.reason(ticket)) == (Phase.ABORTED, "rank 1 was restarted")
    with pytest.raises(SaveFailed, match="a newer process has taken up this rank"):
        world.begin(1, process="a")


def test_a_new_generation_may_save_while_its_ranks_still_join(world: World) -> None:
    old = world.begin(0)
    world.core.join(1, "b1")
    new = world.begin(1, process="b")
    world.core.join(0, "b0")
    assert world.phase(old) is Phase.ABORTED
    assert world.phase(new) is Phase.GATHERING
    assert world.begin(0, process="b").attempt == new.attempt


def test_a_larger_world_may_save_while_its_ranks_still_join(world: World) -> None:
    old = world.begin(0)
    world.core.join(2, "b2", 3)  # nobody knows this rank: it says by its world that all come anew
    new = world.begin(2, process="b", world=3)
    assert world.phase(old) is Phase.ABORTED
    for rank in range(2):
        world.core.join(rank, f"b{rank}", 3)
        assert world.begin(rank, process="b", world=3).attempt == new.attempt
    assert world.phase(new) is Phase.GATHERING


def test_a_rank_restarted_alone_saves_with_the_others(world: World) -> None:
    world.core.join(1, "b1")
    assert world.begin(0).attempt == world.begin(1, process="b").attempt


def test_a_zombie_of_the_old_generation_is_not_mixed_with_the_new(world: World) -> None:
    world.core.join(1, "b1")
    zombie = world.begin(0, process="a")
    mixed = world.begin(1, process="b")
    assert zombie.attempt == mixed.attempt  # rank 0 might have been left running: nobody has said otherwise yet
    world.core.join(0, "b0")
    assert world.phase(mixed) is Phase.ABORTED


def test_what_was_handed_over_survives_the_end_of_its_process(world: World) -> None:
    ticket = world.begin(1)
    world.core.gone(1, "a1", "rank 1 went away")
    assert world.phase(ticket) is Phase.GATHERING
    world.seal([world.begin(0), ticket])
    world.commit()
    assert world.phase(ticket) is Phase.COMMITTED


def test_a_process_that_went_away_before_it_saved_is_not_waited_for(world: World) -> None:
    ticket = world.begin(0)
    world.core.gone(1, "a1", "rank 1 went away")
    assert world.reason(ticket) == "rank 1 went away"


def test_deadlines_name_who_is_missing(world: World) -> None:
    ticket, sealing = world.begin(0, 1), [world.begin(0, 2, save=2), world.begin(1, 2, save=2)]
    for rank in range(2):
        world.core.finished(sealing[rank], rank, 7 if rank == 0 else 0)
    world.clock.time += 59
    world.core.tick()
    assert world.phase(ticket) is Phase.GATHERING
    world.clock.time += 2
    world.core.tick()
    assert world.reason(ticket) == "ranks [0, 1] had not delivered their shards after 60 s"
    assert world.reason(sealing[0]) == "nodes ['node-0', 'node-1'] had not stored their shards after 60 s"
    assert {id for id, _ in world.core.abandoned()} == {1, 2}
    assert world.core.abandoned() == []


def test_a_dead_node_ends_what_it_holds(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    world.core.nodes_alive({"node-0", "node-1"})
    assert world.phase(tickets[0]) is Phase.GATHERING
    world.core.nodes_alive({"node-0"})
    assert world.reason(tickets[0]) == "node node-1 died with the shards of ranks [1]"


def test_another_world_size_ends_the_old_attempts(world: World) -> None:
    ticket = world.begin(0, world=2)
    world.begin(0, 2, world=3, save=2)
    assert "world size changed from 2 to 3" in world.reason(ticket)


@pytest.mark.parametrize(
    ("replicated", "covered", "says"), [(8, 7, "ranks [1] hold other plain tensors"), (7, 6, "do not add up")]
)
def test_shards_that_are_not_whole_make_no_version(world: World, replicated: int, covered: int, says: str) -> None:
    tickets = [world.begin(0), world.begin(1, replicated=replicated)]
    world.core.finished(tickets[0], 0, covered)
    world.core.finished(tickets[1], 1, 0)
    assert says in world.reason(tickets[0])


def test_an_unanswered_commit_keeps_its_objects_and_a_fence_ends_everything(world: World) -> None:
    tickets, waiting = [world.begin(0), world.begin(1)], world.begin(0, 2, save=2)
    world.seal(tickets)
    attempt = world.core.next_commit()
    assert attempt is not None
    world.core.settled(attempt, StoreUnavailable("time-out"))
    assert world.core.abandoned() == []  # it may be a version after all
    again = [world.begin(0, 3, save=3), world.begin(1, 3, save=3)]
    world.seal(again)
    world.core.settled(world.core.attempt(again[0]), Fenced("epoch 9 has replaced epoch 1"))
    assert "epoch 9" in world.reason(waiting)


def test_a_coordinator_that_was_restarted_says_so(world: World) -> None:
    with pytest.raises(SaveFailed, match="the coordinator was restarted"):
        world.core.finished(Ticket(9, "f" * 16, 0, 60.0, 1), 0, 0)


def test_nobody_waits_for_a_rank_whose_save_has_failed_before_it_began(world: World) -> None:
    waiting = world.begin(0, 5)
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert world.reason(waiting) == "rank 1: its node worker died"


def test_nobody_begins_to_wait_for_a_save_that_has_failed_already(world: World) -> None:
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    late = world.begin(0, 5)
    assert world.phase(late) is Phase.ABORTED


def test_a_step_can_be_saved_again_after_a_rank_has_failed_to(world: World) -> None:
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    world.begin(0, 5)
    again = [world.begin(0, 5, save=2), world.begin(1, 5, save=2)]
    world.seal(again)
    world.commit()
    assert world.phase(again[0]) is Phase.COMMITTED


def test_a_failed_save_of_a_former_process_holds_up_nobody(world: World) -> None:
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    world.core.join(1, "b1")
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert world.phase(world.begin(0, 5)) is Phase.GATHERING


def test_what_a_rank_was_part_of_ends_with_its_save(world: World) -> None:
    first, second = world.begin(1, 5), world.begin(1, 6, save=2)
    world.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert (world.phase(first), world.phase(second)) == (Phase.ABORTED, Phase.GATHERING)


def test_a_restarted_coordinator_hears_of_a_failed_save_first(world: World) -> None:
    fresh = World(Coordinator(world.committer, world.clock, writer={}), world.committer, world.clock)
    fresh.core.save_failed(1, "a1", 1, 5, "the coordinator was restarted during this save")
    assert fresh.phase(fresh.begin(0, 5)) is Phase.ABORTED


def test_what_is_staged_everywhere_is_held_until_it_is_a_version(world: World) -> None:
    tickets = [world.begin(0), world.begin(1)]
    for rank, ticket in enumerate(tickets):
        world.core.finished(ticket, rank, 7 if rank == 0 else 0)
    infos = [FragmentInfo(ticket.node, 0, "", (ticket.node,), 0, 0, 0) for ticket in tickets]
    world.core.staged(tickets[0], infos[0], [])
    assert world.core.held() == []
    world.clock.time += 5
    world.core.staged(tickets[1], infos[1], [])
    (held,) = world.core.held()
    assert (held.step, held.fragments) == (1, tuple(infos))
    world.clock.time += 5
    for ticket, info in zip(tickets, infos, strict=True):
        world.core.fragment(ticket, info, [])
    assert world.core.held() == [held]
    world.commit()
    assert world.core.held() == []
    latest = world.committer.repository.latest()
    assert latest is not None
    assert latest.record == held  # also when it was created


def stage(world: World, step: int, *, nodes: int = 2) -> list[Ticket]:
    """Let both ranks save, and so many nodes tell that their part is staged."""
    tickets = [world.begin(0, step, save=step), world.begin(1, step, save=step)]
    for rank, ticket in enumerate(tickets):
        world.core.finished(ticket, rank, 7 if rank == 0 else 0)
    world.clock.time += 1
    for ticket in tickets[:nodes]:
        world.core.staged(ticket, FragmentInfo(ticket.node, 0, "", (ticket.node,), 0, 0, 0), [])
    return tickets


def test_what_was_staged_is_held_though_a_node_has_died_with_it(world: World) -> None:
    tickets = stage(world, 1)
    (promised,) = world.core.held()
    world.core.nodes_alive({"node-0"})
    assert world.phase(tickets[0]) is Phase.ABORTED
    assert world.core.held() == [promised]
    assert [info.node for info in promised.fragments] == [0, 1]


def test_a_node_that_dies_before_all_was_staged_takes_the_save_with_it(world: World) -> None:
    stage(world, 1, nodes=1)
    world.core.nodes_alive({"node-0"})
    assert world.core.held() == []


def test_of_saves_that_were_given_up_only_the_newest_is_held_and_others_beside_it(world: World) -> None:
    for step in (1, 2):
        world.core.failed(stage(world, step)[0], "the store is full")
    assert [record.step for record in world.core.held()] == [2]
    stage(world, 3)
    assert [record.step for record in world.core.held()] == [3, 2]


def test_a_version_ends_the_holding_of_what_was_given_up_before(world: World) -> None:
    world.core.failed(stage(world, 1)[0], "the store is full")
    world.core.tick()
    assert [record.step for record in world.core.held()] == [1]
    tickets = stage(world, 2)
    for ticket in tickets:
        world.core.fragment(ticket, FragmentInfo(ticket.node, 0, "", (ticket.node,), 0, 0, 0), [])
    world.commit()
    assert world.core.held() == []


def test_the_next_version_tells_what_was_restored(world: World) -> None:
    before, late = (RestoreInfo(1, 5, float(at), 2, 0.5, {"store": 9}) for at in range(2))
    world.core.restored([before])
    world.core.failed(stage(world, 1)[0], "the store is full")  # was to tell of it, and will not
    tickets = stage(world, 2)
    promised = world.core.held()[0]
    world.core.restored([late])  # what is held has a digest by now
    for of in (tickets, stage(world, 3)):
        for ticket in of:
            world.core.fragment(ticket, FragmentInfo(ticket.node, 0, "", (ticket.node,), 0, 0, 0), [])
    world.commit()
    records = [version.record for version in world.committer.repository.versions()]
    assert [record.restores for record in records] == [(before,), (late,)]
    assert records[0] == promised


def test_a_tensor_on_two_meshes_makes_no_version(world: World) -> None:
    def begin(rank: int) -> Ticket:
        return world.core.begin(Begin(rank, 2, f"a{rank}", 1, "node", 1, 60.0, 7, 7, vouched=("model.norm", f"stage{rank}")))

    ticket = begin(0)
    assert begin(0) == ticket  # asked twice
    assert world.phase(ticket) is Phase.GATHERING
    begin(1)
    assert "ranks 0 and 1 both hold 'model.norm'" in world.reason(ticket)


def test_some_versions_in_a_row_may_be_differences_to_one_that_is_whole(world: World) -> None:
    offered = []
    for step in range(1, 8):
        tickets = world.both(step, delta=2)
        offered.append(tickets[0].base and tickets[0].base.id)
        assert tickets[0].base == tickets[1].base
        world.seal(tickets, () if offered[-1] is None else (offered[-1],))
        world.commit()
    assert offered == [None, 1, 1, None, 4, 4, None]
    assert world.both(9)[0].base is None, "nobody asked for it"
    assert world.core.bases == {7}


def test_what_came_out_whole_is_what_later_ones_are_differences_to(world: World) -> None:
    world.seal(world.both(1, delta=5))
    world.commit()
    late, whole = world.both(2, delta=5), world.both(3, delta=5)
    world.seal(late)  # its base was in nobody's memory
    world.commit()
    assert world.core.bases == {1, 2}, "a save under way may need the former"
    world.seal(whole, (1,))
    world.commit()
    assert world.core.bases == {2}
    assert world.both(4, delta=5)[0].base.id == 2


def test_after_a_commit_that_failed_the_next_save_is_whole(world: World) -> None:
    world.seal(world.both(1, delta=5))
    world.commit()
    tickets = world.both(2, delta=5)
    world.seal(tickets, (1,))
    world.core.settled(world.core.next_commit(), SaveFailed("what it is a difference to is gone"))
    assert world.both(3, delta=5)[0].base is None
