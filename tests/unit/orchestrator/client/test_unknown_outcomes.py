"""A save that became a version is never reported as failed: its outcome is found, or is reported as unknown."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from helpers.builders import empty_record, memory_repository
from helpers.coordinated_run import CoordinatedRun, coordinated_run
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster
from helpers.polling import wait_until
from helpers.processes import A0, A1
from helpers.saves import Cluster, save
from helpers.scripted_store import script, unscript
from helpers.staged_plan import OPENING, REQUEST, Plan

from raystow.orchestrator.client.failures import Failures
from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.client.save_outcome import find_outcome
from raystow.orchestrator.coordinator.attempt import Phase
from raystow.storage.commit.committer import Committer, outcome_in
from raystow.storage.errors import (
    ClusterError,
    Fenced,
    NotFound,
    OutcomeUnknown,
    RaystowError,
    SaveFailed,
    StoreUnavailable,
)
from raystow.storage.format.root import Dropped, Entry
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.runtime.memory_budget import MemoryBudget
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.packing.attempt import Executors, NodeAttempt, Outcome
from raystow.workers.packing.stale_state import OptimizerWatch
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import (
    STAGING,
    Acknowledged,
    AttemptJoined,
    CoordinatorRequest,
    EndSave,
    Message,
    OpenSession,
    PartFailed,
    PartStored,
    SaveLost,
    SessionOpened,
    Ticket,
)
from raystow.workers.protocol.unix_channel import Listener
from raystow.workers.shm.ring import SLOT, Ring
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


UNKNOWN = OutcomeUnknown("no answer", subject="save of step 7")


def silent(id: int, attempt: str) -> Entry:
    """Ask a coordinator that does not answer."""
    raise ClusterError("did not answer")


def certain(id: int, attempt: str) -> Entry:
    """Ask a coordinator that has given up the attempt."""
    raise SaveFailed("a disk is full", subject=f"version {id}")


def test_the_root_shows_the_outcome_of_an_attempt() -> None:
    repository = memory_repository()
    committer = Committer(repository, "me")
    lost, kept, next_one = (committer.reserve() for _ in range(3))
    version = committer.commit(replace(empty_record(committer), id=kept[0], attempt=kept[1]))
    root = repository.root()
    assert outcome_in(root, *kept) == version.entry
    with pytest.raises(SaveFailed):  # a newer version was committed
        outcome_in(root, *lost)
    with pytest.raises(OutcomeUnknown):
        outcome_in(root, *next_one)
    with pytest.raises(SaveFailed):
        outcome_in(root, *next_one, over=True)
    dropped = replace(root, versions=(), dropped=(Dropped(*kept, at=0.0),))
    with pytest.raises(NotFound, match="dropped since"):
        outcome_in(dropped, *kept)
    compacted = replace(version.entry, attempt="f" * 16, saved=kept[1])
    assert outcome_in(replace(root, versions=(compacted,)), *kept) == compacted


def test_a_swap_without_an_answer_is_an_unknown_outcome() -> None:
    committer = Committer(memory_repository(FakeClock()), "me")
    record = empty_record(committer)
    store = committer.catalog.store
    script(store, put_if=_unavailable)
    with pytest.raises(OutcomeUnknown, match=r"did not confirm the commit: .*time-out"):
        committer.commit(record)
    unscript(store)
    script(store, put=_unavailable)
    with pytest.raises(StoreUnavailable):  # the failure is certain, since there was no swap
        committer.commit(record)
    unscript(store)
    assert committer.commit(record).id == record.id  # a second commit resolves the outcome


def _unavailable(*_: object, **__: object) -> Any:
    raise StoreUnavailable("time-out")


def test_an_unknown_commit_is_reported_as_unknown(run: CoordinatedRun) -> None:
    run.seal([run.begin(0), run.begin(1)])
    attempt = run.core.next_commit()
    assert attempt is not None
    run.core.settled(attempt, OutcomeUnknown("no answer"))
    with pytest.raises(OutcomeUnknown, match="save of step 1: no answer"):
        attempt.result()


def test_a_complete_attempt_is_not_given_up(run: CoordinatedRun) -> None:
    """A node or a rank that gets no answer reports a failure while the root is being swapped."""
    tickets = [run.begin(0), run.begin(1)]
    run.core.finished(tickets[0], 0, 7)
    run.core.finished(tickets[1], 1, 0)
    run.core.fragment(tickets[0], _fragment(tickets[0]))
    run.core.save_failed(0, A0, 1, 1, "its node worker died, after it had stored everything")
    run.core.failed(tickets[0], "the coordinator did not answer")
    assert run.phase(tickets[0]) is Phase.SEALING
    run.core.fragment(tickets[1], _fragment(tickets[1]))
    attempt = run.core.next_commit()
    assert attempt is not None
    run.core.failed(tickets[1], "the coordinator did not answer")  # during the commit
    run.core.save_failed(1, A1, 1, 1, "rank 1: its node worker died")
    assert run.phase(tickets[0]) is Phase.READY
    run.commit()
    assert attempt.result().step == 1


def test_a_part_that_is_not_stored_still_fails_the_save(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    run.core.fragment(tickets[0], _fragment(tickets[0]))
    run.core.save_failed(1, A1, 1, 1, "rank 1: its node worker died")
    with pytest.raises(SaveFailed, match="rank 1: its node worker died"):
        run.core.attempt(tickets[0]).result()


def _fragment(ticket: Ticket) -> Any:
    return FragmentInfo(ticket.node, 0, "00" * 32, (ticket.node,), 0, 0, 0, packs=0)


class LostAnswer(CoordinatorClient):
    """The client of a coordinator that receives the part of a node, and then does not answer."""

    def __init__(self, error: Exception) -> None:
        self._error, self.given_up = error, False

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        if isinstance(request, PartStored):
            raise self._error
        self.given_up = self.given_up or isinstance(request, PartFailed)
        return Acknowledged()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClusterError("did not answer within 720 s"), OutcomeUnknown),
        (KeyError("a bug"), OutcomeUnknown),
        (OutcomeUnknown("the store did not confirm the commit"), OutcomeUnknown),
        (SaveFailed("another node gave up"), SaveFailed),
        (Fenced("epoch 9 has replaced epoch 1"), Fenced),
    ],
)
def test_a_node_without_an_answer_reports_unknown(error: Exception, kind: type[RaystowError]) -> None:
    heard: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    port: Any = LostAnswer(error)
    with ThreadPoolExecutor(1) as pool:
        ticket = Ticket(1, "0123456789abcdef", 0, 60.0, 1)
        shared = Executors(pool, pool, MemoryBudget())
        attempt = NodeAttempt(MemoryStore("lost"), port, ticket, shared, OptimizerWatch("memory://lost"))
        attempt.join(0, [], lambda outcome, _: heard.put(outcome))
        outcome = heard.get(timeout=10)
    assert type(outcome) is kind
    assert not port.given_up  # the coordinator has the part and decides the outcome
    again = SaveLost.of(1, outcome).error
    assert (type(again), str(again)) == (kind, str(outcome))


@pytest.mark.parametrize(("begun", "complete"), [(True, True), (True, False), (False, True)])
def test_a_dead_node_worker_with_all_bytes_is_unknown(begun: bool, complete: bool) -> None:
    """Without ``AttemptJoined`` the part of the rank was not reported to the coordinator."""
    listener = Listener(f"raystow-test-{SYSTEM.token()}")
    outcomes: queue.SimpleQueue[Entry | RaystowError] = queue.SimpleQueue()

    def node_worker() -> None:
        connection = listener.accept()
        assert connection is not None
        connection.handshake("the training process")
        connection.receive(OpenSession)
        ring = Ring.create(2 * SLOT)
        connection.send(SessionOpened(ring.slots, ring.slot_size, 0.0, bytes(32)), fd=ring.fd)
        connection.receive(*STAGING)  # the save begins
        if begun:
            connection.send(AttemptJoined(REQUEST.save, 4, "0123456789abcdef"))
        while complete:
            received = connection.receive(*STAGING)
            if received is None or isinstance(received[0], EndSave):
                break
        connection.close()

    thread = threading.Thread(target=node_worker)
    thread.start()
    staging = Staging(listener.name, OPENING)
    plan = Plan([])
    order = SaveOrder(REQUEST, plan, SaveProgress(7), outcomes.put)
    if not complete:
        plan.find_derived = lambda: wait_until(lambda: staging.lost, "the end of the node worker")  # type: ignore[method-assign]
    staging.submit(order)
    outcome = outcomes.get(timeout=10)
    assert type(outcome) is (OutcomeUnknown if begun and complete else SaveFailed)
    assert order.progress.attempt == ((4, "0123456789abcdef") if begun else None)
    staging.close(patience=1)
    listener.close()
    thread.join()


def test_a_save_after_the_death_of_the_node_worker_ends() -> None:
    """The process may not have noticed the death yet when it submits the save."""
    with LocalCluster("memory://dead") as cluster:
        staging = Staging(cluster.address(0), cluster.opening(0, 1))
        staging.connection.shut()
        wait_until(lambda: staging.lost, "the end of the connection")
        ended, progress = list[object](), SaveProgress(7)
        staging.submit(SaveOrder(REQUEST, Plan([]), progress, lambda outcome: ended.extend((outcome, progress.read.is_set()))))
        assert isinstance(ended[0], SaveFailed)
        assert ended[1]
        staging.close(patience=1)


def test_the_outcome_is_found_in_the_root_or_the_coordinator() -> None:
    with LocalCluster("memory://learned") as cluster:
        version = cluster.save({"x": 1}, step=7)
        entry = version.entry
        found = find_outcome(cluster.repository, silent, (entry.id, entry.attempt), UNKNOWN)
        assert found == version
        missing = entry.id + 1, "f" * 16
        assert find_outcome(cluster.repository, silent, missing, UNKNOWN) is UNKNOWN
        assert find_outcome(cluster.repository, silent, None, UNKNOWN) is UNKNOWN
        failed = find_outcome(cluster.repository, certain, missing, UNKNOWN)
        assert (type(failed), str(failed)) == (SaveFailed, "save of step 7: a disk is full")
        spent = find_outcome(cluster.repository, silent, (entry.id, "f" * 16), UNKNOWN)
        assert type(spent) is SaveFailed


def test_result_queries_again_while_the_outcome_is_unknown() -> None:
    outcome = save(7, cluster=Cluster(*(ClusterError("did not answer"),) * 2, SaveFailed("certain")))
    pending, outcome.progress.attempt = Pending(outcome), (9, "f" * 16)
    outcome.report(UNKNOWN)
    assert outcome.wait(60)
    assert (pending.done(), repr(pending)) == (True, "Pending(step=7, outcome unknown)")
    with pytest.raises(OutcomeUnknown):
        pending.result()
    for _ in range(2):  # the known outcome is not queried again
        with pytest.raises(SaveFailed, match="certain"):
            pending.result()
    outcome.report(SaveFailed("another error"))
    with pytest.raises(SaveFailed, match="certain"):
        pending.result()


def test_an_unknown_outcome_is_a_failure_until_it_is_found() -> None:
    failures = Failures("raise", count=lambda: None)
    failures.failed(7, UNKNOWN)
    assert (failures.total, failures.in_a_row) == (1, 1)
    with pytest.raises(OutcomeUnknown):
        failures.check()
    failures.failed(8, UNKNOWN)
    failures.found_durable(UNKNOWN)
    failures.check()
    assert failures.total == 1


def test_fenced_is_raised_for_any_on_failure() -> None:
    failures = Failures("warn", count=lambda: None)
    failures.failed(7, Fenced("another run"))
    for _ in range(2):
        with pytest.raises(Fenced):
            failures.check()
