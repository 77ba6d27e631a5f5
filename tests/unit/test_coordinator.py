"""The coordinator's state machine, stepped by hand: who belongs to which attempt, and what ends one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from builders import memory_repository
from fake_clock import FakeClock

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.committer import Committer
from raystow.storage.errors import Fenced, SaveFailed, StoreUnavailable
from raystow.storage.format.version_record import FragmentInfo, PackInfo, RestoreInfo
from raystow.workers.protocol.messages import Begin, Ticket


def part(node: int, bases: tuple[int, ...] = ()) -> FragmentInfo:
    """What a node reports that has stored nothing."""
    return FragmentInfo(node, 0, "00" * 32, (node,), 0, 0, 0, bases=bases)


@dataclass
class CoordinatedRun:
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
            self.core.fragment(ticket, part(ticket.node, bases), [])

    def both(self, step: int, *, delta: int = 0) -> list[Ticket]:
        return [self.begin(rank, step, save=step, delta=delta) for rank in range(2)]

    def commit(self) -> None:
        while (attempt := self.core.next_commit()) is not None:
            self.core.settled(attempt, self.committer.commit(self.core.record(attempt)).entry)


@pytest.fixture
def run() -> CoordinatedRun:
    clock = FakeClock()
    committer = Committer(memory_repository(clock), "test")
    core = Coordinator(committer, clock, writer={})
    for rank in range(2):
        core.join(rank, f"a{rank}", 2)
    return CoordinatedRun(core, committer, clock)


def test_two_ranks_make_a_version(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    assert tickets[0].attempt == tickets[1].attempt
    assert [ticket.node for ticket in tickets] == [0, 1]
    run.seal(tickets)
    assert run.phase(tickets[0]) is Phase.READY
    run.commit()
    assert run.phase(tickets[0]) is Phase.COMMITTED
    assert [version.id for version in run.committer.catalog.versions()] == [1]


def test_versions_come_in_the_order_of_saves(run: CoordinatedRun) -> None:
    first, second = [run.begin(0, 1), run.begin(1, 1)], [run.begin(0, 2, save=2), run.begin(1, 2, save=2)]
    run.seal(second)
    assert run.core.next_commit() is None
    run.core.failed(first[0], "a disk is full")
    run.commit()
    assert [version.step for version in run.committer.catalog.versions()] == [2]


def test_a_rank_saves_one_step_twice(run: CoordinatedRun) -> None:
    first, second = run.begin(0, save=1), run.begin(0, save=2)
    assert first.attempt != second.attempt
    assert run.begin(1, save=1).attempt == first.attempt
    assert run.begin(1, save=2).attempt == second.attempt


def test_a_call_made_twice_counts_once(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    assert run.begin(0) == tickets[0]
    run.seal(tickets)
    run.core.fragment(tickets[0], part(0), [])
    run.commit()
    assert len(run.committer.catalog.versions()) == 1


def test_a_fragment_told_again_after_the_commit_is_no_error(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.seal(tickets)
    run.commit()
    run.core.fragment(tickets[0], part(0), [])
    assert run.phase(tickets[0]) is Phase.COMMITTED


def test_only_what_someone_may_wait_for_counts_as_a_change(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.core.finished(tickets[0], 0, 7)
    assert run.core.changes == 0
    run.core.finished(tickets[1], 1, 0)
    assert (run.core.changes, run.phase(tickets[0])) == (1, Phase.SEALING)
    run.core.fragment(tickets[0], part(0), [])
    assert run.core.changes == 1


def test_a_restarted_rank_ends_attempts_that_wait_for_it(run: CoordinatedRun) -> None:
    ticket = run.begin(0)
    run.core.join(1, "b1")
    assert (run.phase(ticket), run.reason(ticket)) == (Phase.ABORTED, "rank 1 was restarted")
    with pytest.raises(Fenced, match="another process has taken up this rank after another process"):
        run.begin(1, process="a")


def test_two_processes_of_one_rank_are_named(run: CoordinatedRun) -> None:
    run.core.join(0, "t0@process 17 on first-host")
    run.core.join(0, "t1@process 4 on other-host")
    told = "rank 0 of memory://.*: process 4 on other-host has taken up this rank after process 17 on first-host .*on_fenced"
    with pytest.raises(Fenced, match=told):
        run.core.begin(Begin(0, 1, "t0@process 17 on first-host", 1, "node-0", 1, 60.0, 7, 7))


def test_ranks_that_save_different_steps_are_told_at_once(run: CoordinatedRun) -> None:
    run.core.join(0, "a0", 2)
    run.core.join(1, "a1", 2)
    ten, twenty = run.begin(0, 10, save=1), run.begin(1, 20, save=1)
    told = "rank 1 saves step 20 where rank 0 saved step 10: all ranks must save the same steps in the same order"
    assert (run.phase(ten), run.reason(ten)) == (Phase.ABORTED, told)
    assert run.begin(0, 20, save=2).attempt == twenty.attempt  # the step that both save becomes a version


def test_a_rank_that_is_ahead_is_waited_for(run: CoordinatedRun) -> None:
    """It begins its second save before another rank begins its first, of the same steps."""
    run.core.join(0, "a0", 2)
    run.core.join(1, "a1", 2)
    first, second = run.begin(0, 10, save=1), run.begin(0, 20, save=2)
    assert run.begin(1, 10, save=1).attempt == first.attempt
    assert run.begin(1, 20, save=2).attempt == second.attempt


def test_a_repeated_call_of_a_slow_rank_ends_no_later_attempt(run: CoordinatedRun) -> None:
    run.core.join(0, "a0", 2)
    run.core.join(1, "a1", 2)
    later = run.begin(0, 20, save=2)
    run.begin(1, 10, save=1)
    assert run.phase(later) is Phase.GATHERING


def test_a_new_generation_may_save_while_its_ranks_still_join(run: CoordinatedRun) -> None:
    old = run.begin(0)
    run.core.join(1, "b1")
    new = run.begin(1, process="b")
    run.core.join(0, "b0")
    assert run.phase(old) is Phase.ABORTED
    assert run.phase(new) is Phase.GATHERING
    assert run.begin(0, process="b").attempt == new.attempt


def test_a_larger_world_may_save_while_its_ranks_still_join(run: CoordinatedRun) -> None:
    old = run.begin(0)
    run.core.join(2, "b2", 3)  # nobody knows this rank: it says by its world that all come anew
    new = run.begin(2, process="b", world=3)
    assert run.phase(old) is Phase.ABORTED
    for rank in range(2):
        run.core.join(rank, f"b{rank}", 3)
        assert run.begin(rank, process="b", world=3).attempt == new.attempt
    assert run.phase(new) is Phase.GATHERING


def test_a_rank_restarted_alone_saves_with_the_others(run: CoordinatedRun) -> None:
    run.core.join(1, "b1")
    assert run.begin(0).attempt == run.begin(1, process="b").attempt


def test_a_process_of_an_old_generation_joins_no_new_attempt(run: CoordinatedRun) -> None:
    run.core.join(1, "b1")
    zombie = run.begin(0, process="a")
    mixed = run.begin(1, process="b")
    assert zombie.attempt == mixed.attempt  # rank 0 might have been left running: nobody has said otherwise yet
    run.core.join(0, "b0")
    assert run.phase(mixed) is Phase.ABORTED


def test_what_was_handed_over_survives_the_end_of_its_process(run: CoordinatedRun) -> None:
    ticket = run.begin(1)
    run.core.rank_disconnected(1, "a1", "rank 1 went away")
    assert run.phase(ticket) is Phase.GATHERING
    run.seal([run.begin(0), ticket])
    run.commit()
    assert run.phase(ticket) is Phase.COMMITTED


def test_a_process_that_left_before_saving_is_not_waited_for(run: CoordinatedRun) -> None:
    ticket = run.begin(0)
    run.core.rank_disconnected(1, "a1", "rank 1 went away")
    assert run.reason(ticket) == "rank 1 went away"


def test_deadlines_name_who_is_missing(run: CoordinatedRun) -> None:
    sealing, ticket = [run.begin(0, 1), run.begin(1, 1)], run.begin(0, 2, save=2)
    for rank in range(2):
        run.core.finished(sealing[rank], rank, 7 if rank == 0 else 0)
    run.clock.time += 59
    run.core.tick()
    assert run.phase(ticket) is Phase.GATHERING
    run.clock.time += 2
    run.core.tick()
    assert run.reason(ticket) == "ranks [0, 1] had not delivered their shards after 60 s"
    assert run.reason(sealing[0]) == "nodes ['node-0', 'node-1'] had not stored their shards after 60 s"
    assert {id for id, _ in run.core.abandoned()} == {1, 2}
    assert run.core.abandoned() == []


def test_a_dead_node_ends_what_it_holds(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.core.nodes_alive({"node-0", "node-1"})
    assert run.phase(tickets[0]) is Phase.GATHERING
    run.core.nodes_alive({"node-0"})
    assert run.reason(tickets[0]) == "node node-1 died with the shards of ranks [1]"


def test_another_world_size_ends_the_old_attempts(run: CoordinatedRun) -> None:
    ticket = run.begin(0, world=2)
    run.begin(0, 2, world=3, save=2)
    assert "world size changed from 2 to 3" in run.reason(ticket)


@pytest.mark.parametrize(
    ("replicated", "covered", "says"), [(8, 7, "ranks [1] hold other plain tensors"), (7, 6, "do not add up")]
)
def test_shards_that_are_not_whole_make_no_version(run: CoordinatedRun, replicated: int, covered: int, says: str) -> None:
    tickets = [run.begin(0), run.begin(1, replicated=replicated)]
    run.core.finished(tickets[0], 0, covered)
    run.core.finished(tickets[1], 1, 0)
    assert says in run.reason(tickets[0])


def test_the_first_plain_tensors_that_differ_are_named(run: CoordinatedRun) -> None:
    """Also in a later save, in which nobody tells its tensors again."""
    alike, rest = ("w float32 [3, 4]", "b float32 [4]"), ("w float32 [3, 4]", "b float32 [5]", "more int8 [1]")
    for step in (1, 2):
        told = {0: alike, 1: rest} if step == 1 else {0: (), 1: ()}
        tickets = [
            run.core.begin(Begin(rank, 2, f"a{rank}", step, "node", step, 60.0, 7 + rank, 7, plain_tensors=told[rank]))
            for rank in range(2)
        ]
        for rank, ticket in enumerate(tickets):
            run.core.finished(ticket, rank, 7)
        assert "(rank 1 has b float32 [5], more int8 [1]; rank 0 has b float32 [4])" in run.reason(tickets[0])


def test_an_unanswered_commit_keeps_its_objects(run: CoordinatedRun) -> None:
    """And a newer epoch ends all attempts."""
    run.seal([run.begin(0), run.begin(1)])
    attempt = run.core.next_commit()
    assert attempt is not None
    run.core.settled(attempt, StoreUnavailable("time-out"))
    assert run.core.abandoned() == []  # it may be a version after all
    again = [run.begin(0, 3, save=3), run.begin(1, 3, save=3)]
    waiting = run.begin(0, 4, save=4)
    run.seal(again)
    run.core.settled(run.core.attempt(again[0]), Fenced("epoch 9 has replaced epoch 1"))
    assert "epoch 9" in run.reason(waiting)


def test_a_coordinator_that_was_restarted_says_so(run: CoordinatedRun) -> None:
    with pytest.raises(SaveFailed, match="the coordinator was restarted"):
        run.core.finished(Ticket(9, "f" * 16, 0, 60.0, 1), 0, 0)


def test_a_save_failed_before_it_began_is_not_waited_for(run: CoordinatedRun) -> None:
    waiting = run.begin(0, 5)
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert run.reason(waiting) == "rank 1: its node worker died"


def test_a_save_that_has_failed_starts_no_attempt(run: CoordinatedRun) -> None:
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    late = run.begin(0, 5)
    assert run.phase(late) is Phase.ABORTED


def test_a_step_can_be_saved_again_after_a_rank_has_failed_to(run: CoordinatedRun) -> None:
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    run.begin(0, 5)
    again = [run.begin(0, 5, save=2), run.begin(1, 5, save=2)]
    run.seal(again)
    run.commit()
    assert run.phase(again[0]) is Phase.COMMITTED


def test_one_rank_logs_a_failed_save_for_all(run: CoordinatedRun) -> None:
    report = (5, "rank 1: its node worker died")
    assert run.core.save_failed(1, "a1", 1, *report)
    assert not run.core.save_failed(0, "a0", 1, *report)
    assert run.core.save_failed(1, "a1", 1, *report)  # again, since the answer was lost
    assert run.core.save_failed(0, "a0", 2, *report)  # the step is saved again
    run.core.join(1, "b1")
    assert run.core.save_failed(1, "a1", 1, *report)  # a replaced process, about itself


def test_a_failed_save_of_a_former_process_holds_up_nobody(run: CoordinatedRun) -> None:
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    run.core.join(1, "b1")
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert run.phase(run.begin(0, 5)) is Phase.GATHERING


def test_what_a_rank_was_part_of_ends_with_its_save(run: CoordinatedRun) -> None:
    first, second = run.begin(1, 5), run.begin(1, 6, save=2)
    run.core.save_failed(1, "a1", 1, 5, "rank 1: its node worker died")
    assert (run.phase(first), run.phase(second)) == (Phase.ABORTED, Phase.GATHERING)


def test_a_restarted_coordinator_hears_of_a_failed_save_first(run: CoordinatedRun) -> None:
    fresh = CoordinatedRun(Coordinator(run.committer, run.clock, writer={}), run.committer, run.clock)
    fresh.core.save_failed(1, "a1", 1, 5, "the coordinator was restarted during this save")
    assert fresh.phase(fresh.begin(0, 5)) is Phase.ABORTED


@pytest.mark.parametrize(
    ("change", "packs"),
    [
        ({"node": 1}, []),
        ({"digest": "AB" * 32}, []),
        ({"size": -1}, []),
        ({"size": 1 << 40}, []),
        ({"raw": -1}, []),
        ({"stored": 1 << 63}, []),
        ({"ranks": (-1,)}, []),
        ({"stall": float("nan")}, []),
        ({"bases": (2, 1)}, []),
        ({}, [PackInfo(1, "weights", 0, 1)]),
        ({}, [PackInfo(0, "../weights", 0, 1)]),
        ({}, [PackInfo(0, "weights", 10**9, 1)]),
        ({}, [PackInfo(0, "weights", 0, -1)]),
        ({}, [PackInfo(0, "weights", 0, 1), PackInfo(0, "weights", 0, 1)]),
    ],
)
@pytest.mark.parametrize("durable", [False, True])
def test_a_part_that_no_reader_takes_ends_the_save(
    run: CoordinatedRun, change: dict[str, object], packs: list[PackInfo], *, durable: bool
) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    report = run.core.fragment if durable else run.core.staged
    with pytest.raises(SaveFailed, match="node 0 reported a part that no reader would take"):
        report(tickets[0], replace(part(0), **change), packs)
    assert run.phase(tickets[0]) is Phase.ABORTED
    run.seal(run.both(2))
    run.commit()
    assert [version.step for version in run.committer.catalog.versions()] == [2]


def test_an_impossible_restore_fails_no_save(run: CoordinatedRun) -> None:
    good = RestoreInfo(1, 10, 0.0, 2, 1.5, {"store": 5})
    run.core.restored([replace(good, read={"store": -1}), good, replace(good, seconds=float("inf"))])
    tickets = run.both(1)
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    for report in (run.core.staged, run.core.fragment):
        for ticket in tickets:
            report(ticket, part(ticket.node), [])
    run.commit()
    assert run.committer.catalog.latest().record.restores == (good,)


def test_what_is_staged_everywhere_is_held_until_it_is_a_version(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    infos = [part(ticket.node) for ticket in tickets]
    run.core.staged(tickets[0], infos[0], [])
    assert run.core.held() == []
    run.clock.time += 5
    run.core.staged(tickets[1], infos[1], [])
    (held,) = run.core.held()
    assert (held.step, held.fragments) == (1, tuple(infos))
    run.clock.time += 5
    for ticket, info in zip(tickets, infos, strict=True):
        run.core.fragment(ticket, info, [])
    assert run.core.held() == [held]
    run.commit()
    assert run.core.held() == []
    latest = run.committer.catalog.latest()
    assert latest is not None
    assert latest.record == held  # also when it was created


def stage(run: CoordinatedRun, step: int, *, nodes: int = 2) -> list[Ticket]:
    """Let both ranks save, and so many nodes tell that their part is staged."""
    tickets = [run.begin(0, step, save=step), run.begin(1, step, save=step)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    run.clock.time += 1
    for ticket in tickets[:nodes]:
        run.core.staged(ticket, part(ticket.node), [])
    return tickets


def test_what_was_staged_is_held_though_a_node_has_died_with_it(run: CoordinatedRun) -> None:
    tickets = stage(run, 1)
    (promised,) = run.core.held()
    run.core.nodes_alive({"node-0"})
    assert run.phase(tickets[0]) is Phase.ABORTED
    assert run.core.held() == [promised]
    assert [info.node for info in promised.fragments] == [0, 1]


def test_a_node_that_dies_before_staging_ends_aborts_the_save(run: CoordinatedRun) -> None:
    stage(run, 1, nodes=1)
    run.core.nodes_alive({"node-0"})
    assert run.core.held() == []


def test_only_the_newest_aborted_save_is_held(run: CoordinatedRun) -> None:
    """Besides those under way."""
    for step in (1, 2):
        run.core.failed(stage(run, step)[0], "the store is full")
    assert [record.step for record in run.core.held()] == [2]
    stage(run, 3)
    assert [record.step for record in run.core.held()] == [3, 2]


def test_a_version_ends_the_holding_of_what_was_given_up_before(run: CoordinatedRun) -> None:
    run.core.failed(stage(run, 1)[0], "the store is full")
    run.core.tick()
    assert [record.step for record in run.core.held()] == [1]
    tickets = stage(run, 2)
    for ticket in tickets:
        run.core.fragment(ticket, part(ticket.node), [])
    run.commit()
    assert run.core.held() == []


def test_the_next_version_tells_what_was_restored(run: CoordinatedRun) -> None:
    before, late = (RestoreInfo(1, 5, float(at), 2, 0.5, {"store": 9}) for at in range(2))
    run.core.restored([before])
    run.core.failed(stage(run, 1)[0], "the store is full")  # was to tell of it, and will not
    tickets = stage(run, 2)
    promised = run.core.held()[0]
    run.core.restored([late])  # what is held has a digest by now
    for of in (tickets, stage(run, 3)):
        for ticket in of:
            run.core.fragment(ticket, part(ticket.node), [])
    run.commit()
    records = [version.record for version in run.committer.catalog.versions()]
    assert [record.restores for record in records] == [(before,), (late,)]
    assert records[0] == promised


def test_a_tensor_on_two_meshes_makes_no_version(run: CoordinatedRun) -> None:
    def begin(rank: int) -> Ticket:
        return run.core.begin(Begin(rank, 2, f"a{rank}", 1, "node", 1, 60.0, 7, 7, owned_dtensors=("model.norm", f"stage{rank}")))

    ticket = begin(0)
    assert begin(0) == ticket  # asked twice
    assert run.phase(ticket) is Phase.GATHERING
    begin(1)
    assert "ranks 0 and 1 both hold 'model.norm'" in run.reason(ticket)


def test_several_versions_may_be_deltas_to_a_whole_one(run: CoordinatedRun) -> None:
    offered = []
    for step in range(1, 8):
        tickets = run.both(step, delta=2)
        base = tickets[0].base
        offered.append(base.id if base is not None and tickets[0].deltas else None)
        assert base == tickets[1].base
        assert base is None or base.id == max(id for id in (1, 4) if id < step), "unchanged chunks refer to it in any case"
        run.seal(tickets, () if offered[-1] is None else (offered[-1],))
        run.commit()
    assert offered == [None, 1, 1, None, 4, 4, None]
    assert run.both(9)[0].base is None, "nobody asked for it"
    assert run.core.bases == {7}


def test_a_version_stored_whole_becomes_the_base(run: CoordinatedRun) -> None:
    run.seal(run.both(1, delta=5))
    run.commit()
    late, whole = run.both(2, delta=5), run.both(3, delta=5)
    run.seal(late)  # its base was in nobody's memory
    run.commit()
    assert run.core.bases == {1, 2}, "a save under way may need the former"
    run.seal(whole, (1,))
    run.commit()
    assert run.core.bases == {2}
    assert run.both(4, delta=5)[0].base.id == 2


def test_after_a_commit_that_failed_the_next_save_is_whole(run: CoordinatedRun) -> None:
    run.seal(run.both(1, delta=5))
    run.commit()
    tickets = run.both(2, delta=5)
    run.seal(tickets, (1,))
    run.core.settled(run.core.next_commit(), SaveFailed("what it is a difference to is gone"))
    assert run.both(3, delta=5)[0].base is None


def test_after_a_rollback_saves_under_way_fail(run: CoordinatedRun) -> None:
    """The first of them notices it. No chunk refers to what was rolled back."""
    catalog = run.committer.catalog
    for step in (1, 2):
        run.seal(run.both(step))
        run.commit()
    run.seal(run.both(3, delta=5))
    run.commit()
    under_way, next_one = run.both(4, delta=5), run.both(5, delta=5)
    catalog.rollback(catalog.version(2))
    for tickets in (under_way, next_one):
        run.seal(tickets, (3,))
        attempt = run.core.next_commit()
        with pytest.raises(SaveFailed, match="rolled back since the save began") as refused:
            run.committer.commit(run.core.record(attempt))
        run.core.settled(attempt, refused.value)
        assert run.phase(tickets[0]) is Phase.ABORTED
    tickets = run.both(6, delta=5)
    assert tickets[0].base is None
    run.seal(tickets)
    run.commit()
    assert [version.step for version in catalog.versions()] == [1, 2, 6]
    assert run.both(7, delta=5)[0].base.id == 6


def test_a_rollback_noticed_by_a_restore_ends_the_deltas(run: CoordinatedRun) -> None:
    catalog = run.committer.catalog
    for step in (1, 2):
        run.seal(run.both(step, delta=5))
        run.commit()
    catalog.rollback(catalog.version(1))
    run.committer.notice(catalog.root())
    assert run.both(3, delta=5)[0].base is None
