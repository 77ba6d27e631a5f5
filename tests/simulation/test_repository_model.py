"""A stateful Hypothesis test of the real repository, committer, retention and collection against a small model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import pytest
from helpers.fake_clock import FakeClock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Fenced, NotFound, SaveFailed, StateError
from raystow.storage.format import keys
from raystow.storage.format.root import Root
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.repository import Repository
from raystow.storage.retention.collect import CollectionPlan, GarbageKind
from raystow.storage.retention.plan import RetentionPlan
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.versions.version import Version

from . import payload

LEASE = 3600.0
Attempt = tuple[int, str]


@dataclass
class Model:
    """A model of a repository. ``written`` is the time of the last write of each attempt."""

    next_id: int = 1
    epoch: int = 0
    live: list[Attempt] = field(default_factory=list)
    steps: dict[Attempt, int] = field(default_factory=dict)
    pins: dict[str, int] = field(default_factory=dict)
    verified: int = 0
    dropped: dict[Attempt, float] = field(default_factory=dict)
    leases: dict[int, tuple[Attempt, float]] = field(default_factory=dict)
    written: dict[Attempt, float] = field(default_factory=dict)
    objects: dict[Attempt, int] = field(default_factory=dict)

    def leased(self, now: float) -> set[Attempt]:
        return {attempt for attempt, since in self.leases.values() if now < since + LEASE}

    def always_kept(self) -> set[Attempt]:
        return {a for a in self.live if a == self.live[-1] or a[0] in {*self.pins.values(), self.verified}}

    def collectable(self, now: float, grace: float) -> set[Attempt]:
        """Return the attempts that a collection planned now will delete."""
        idle = {a: now - self.dropped.get(a, at) for a, at in self.written.items() if a not in self.live and self.objects[a]}
        idle |= {a: now - at for a, at in self.dropped.items()}
        busy = any(a[0] >= self.next_id and seconds < grace for a, seconds in idle.items())
        return {
            a
            for a, seconds in idle.items()
            if seconds >= grace and a not in self.leased(now) and not (busy and a[0] >= self.next_id)
        }


class RepositoryModel(RuleBasedStateMachine):
    """The state machine: each rule applies one operation to the repository and to the model."""

    prunings = Bundle("prunings")
    collections = Bundle("collections")

    def __init__(self) -> None:
        super().__init__()
        self.model, self.clock = Model(), FakeClock()
        self.clock.time = 1e9
        self.store = MemoryStore("model", clock=self.clock)
        self.committers: list[Committer] = []
        self.saving: list[tuple[Committer, VersionRecord]] = []
        self.readers: dict[int, contextlib.ExitStack] = {}
        self.repository = Repository(self.store, "0" * 32, clock=self.clock)

    @initialize()
    def begin(self) -> None:
        self.repository.register.create(Root(repository=self.repository.id))
        self.take_charge()

    @precondition(lambda self: self.model.next_id > 3 * self.model.epoch)
    @rule()
    def take_charge(self) -> None:
        self.model.epoch += 1
        self.committers.append(Committer(self.repository, self.clock.token()))

    @rule(steps=st.lists(st.integers(0, 20), min_size=1, max_size=4), nodes=st.integers(1, 2))
    def save(self, steps: list[int], nodes: int) -> None:
        for step in steps:
            record = self._store_attempt(self.committers[-1], step, nodes)
            self._commit(self.committers[-1], record)

    @rule(steps=st.integers(0, 20))
    def begin_to_save(self, steps: int) -> None:
        """Store everything except the record: the commit may follow later, or never."""
        self.saving.append((self.committers[-1], self._store_attempt(self.committers[-1], steps, 1)))

    @precondition(lambda self: self.saving)
    @rule(data=st.data())
    def end_a_save(self, data: st.DataObject) -> None:
        """Commit, possibly hours later in a past epoch."""
        self._commit(*self.saving.pop(data.draw(st.integers(0, len(self.saving) - 1))))

    @precondition(lambda self: self.saving)
    @rule(data=st.data())
    def give_up_a_save(self, data: st.DataObject) -> None:
        committer, record = self.saving.pop(data.draw(st.integers(0, len(self.saving) - 1)))
        committer.discard(record.id, record.attempt)
        self.model.objects[record.id, record.attempt] = 0

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def discard_a_live_or_dropped_version(self, data: st.DataObject) -> None:
        """Discard as a fenced coordinator does that did not learn that its commit had succeeded."""
        attempt = data.draw(st.sampled_from([*self.model.live, *self.model.dropped]))
        self.committers[0].discard(*attempt)

    @rule(hours=st.sampled_from([0.01, 0.4, 1.0, 3.0]))
    def wait(self, hours: float) -> None:
        self.clock.time += 3600 * hours

    @rule()
    def reopen(self) -> None:
        self.repository = Repository(self.store, self.repository.id, clock=self.clock)

    @rule(data=st.data(), name=st.sampled_from("ab"))
    def pin(self, data: st.DataObject, name: str) -> None:
        version = self._some_version(data)
        if version is not None:
            self.repository.pin(version, name)
            self.model.pins[name] = version.id

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.repository.unpin(name)
        self.model.pins.pop(name, None)

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        version = self._some_version(data)
        if version is not None:
            self.repository.verify(version)
            self.repository.record_verified(version)
            self.model.verified = max(self.model.verified, version.id)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        version = self._some_version(data)
        if version is not None:
            stack, number = contextlib.ExitStack(), len(self.readers)
            stack.enter_context(self.repository.lease(version))
            self.readers[number] = stack
            self.model.leases[number] = (version.id, version.attempt), self.clock.time

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.leases)))
        self.readers[number].close()
        del self.model.leases[number]

    @rule(target=prunings, last=st.integers(1, 4), every=st.sampled_from([None, 5]))
    def plan_pruning(self, last: int, every: int | None) -> RetentionPlan:
        plan = self.repository.plan_retention(Policy(keep_last=last, keep_every=every))
        kept = self.model.always_kept() | self.model.leased(self.clock.time) | set(self.model.live[-last:])
        if every is not None:
            kept |= set({self.model.steps[a] // every: a for a in self.model.live}.values())
        assert {(d.entry.id, d.entry.attempt) for d in plan.decisions if d.keep} == kept & set(self.model.live)
        return plan

    @rule(plan=prunings)
    def prune(self, plan: RetentionPlan) -> None:
        going = {(entry.id, entry.attempt) for entry in plan.dropped} & set(self.model.live) - self.model.always_kept()
        plan.execute()
        self.model.live = [attempt for attempt in self.model.live if attempt not in going]
        self.model.dropped |= dict.fromkeys(sorted(going), self.clock.time)

    @rule(last=st.integers(1, 2))
    def prune_now(self, last: int) -> None:
        self.prune(self.plan_pruning(last, None))

    @rule(grace=st.sampled_from([0.0, 3600.0]))
    def collect_now(self, grace: float) -> None:
        self.collect(self.plan_collection(grace))

    @rule(target=collections, grace=st.sampled_from([0.0, 1800.0, 3600.0]))
    def plan_collection(self, grace: float) -> CollectionPlan:
        plan = self.repository.plan_collection(grace=grace)
        assert {(g.id, g.attempt) for g in plan.due} == self.model.collectable(self.clock.time, grace)
        return plan

    @rule(plan=collections)
    def collect(self, plan: CollectionPlan) -> None:
        passed = {(g.id, g.attempt) for g in plan.due if g.kind in (GarbageKind.DROPPED, GarbageKind.FAILED)}
        others = {(g.id, g.attempt) for g in plan.due} - passed  # judged again: a save may have begun since the plan was made
        due = passed | (others & self.model.collectable(self.clock.time, plan.grace))
        going = due - set(self.model.live) - self.model.leased(self.clock.time)
        plan.execute()
        self.model.next_id = max([self.model.next_id, *(id + 1 for id, _ in due)])
        for attempt in going:
            self.model.objects[attempt] = 0
            self.model.dropped.pop(attempt, None)

    @invariant()
    def the_root_equals_the_model(self) -> None:
        root = self.repository.root()
        model = self.model
        assert [(entry.id, entry.attempt) for entry in root.versions] == model.live
        assert (root.next_id, root.epoch, root.pins, root.verified) == (model.next_id, model.epoch, model.pins, model.verified)
        assert {(d.id, d.attempt): d.at for d in root.dropped} == model.dropped

    @invariant()
    def the_store_contains_the_objects_of_the_model(self) -> None:
        held: dict[Attempt, int] = {}
        for info in self.store.list(keys.VERSIONS):
            attempt = keys.attempt_of(info.key)
            assert attempt is not None
            held[attempt] = held.get(attempt, 0) + 1
        assert held == {attempt: count for attempt, count in self.model.objects.items() if count}

    def teardown(self) -> None:
        for version in self.repository.versions():
            self.repository.verify(version)
        for stack in self.readers.values():
            stack.close()

    def _commit(self, committer: Committer, record: VersionRecord) -> None:
        attempt = record.id, record.attempt
        self.model.objects[attempt] += 1  # its record
        self.model.written[attempt] = self.clock.time
        if committer.epoch != self.model.epoch:
            with pytest.raises(Fenced):
                committer.commit(record)
        elif record.id < self.model.next_id:
            with pytest.raises(SaveFailed, match="spent"):
                committer.commit(record)
        else:
            version = committer.commit(record)
            assert committer.commit(record) == version  # a repeated commit, as after a lost answer
            self.model.live.append(attempt)
            self.model.next_id = record.id + 1

    def _store_attempt(self, committer: Committer, step: int, nodes: int) -> VersionRecord:
        """Store everything of a save except its record."""
        id, attempt = committer.reserve()
        record = VersionRecord(self.repository.id, id, attempt, committer.epoch, step, created=1.5, world_size=nodes)
        parts = [payload.part(node, 0) for node in range(nodes)]
        for node, part in enumerate(parts):
            self.store.put(keys.pack(id, attempt, node, payload.GROUP, 0), [part.pack])
            self.store.put(keys.fragment(id, attempt, node), [part.fragment])
        self.model.written[id, attempt], self.model.steps[id, attempt] = self.clock.time, step
        self.model.objects[id, attempt] = 2 * nodes
        return replace(record, fragments=tuple(p.info for p in parts), packs=None)

    def _some_version(self, data: st.DataObject) -> Version | None:
        versions = self.repository.versions()
        return data.draw(st.sampled_from(versions)) if versions else None


TestRepository = RepositoryModel.TestCase
TestRepository.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def test_a_dropped_version_cannot_be_used_again() -> None:
    """A dropped version can be neither pinned nor leased nor committed again; the random rules rarely reach this case."""
    machine = RepositoryModel()
    machine.begin()
    machine.save([1], 1)
    (version,) = machine.repository.versions()
    record = version.record
    machine.save([2], 1)
    machine.prune(machine.plan_pruning(1, None))
    with pytest.raises(StateError, match="no version 1 to pin"):
        machine.repository.pin(version, "a")
    with pytest.raises(NotFound, match="dropped meanwhile"), machine.repository.lease(version):
        pass
    with pytest.raises(SaveFailed, match="spent"):
        machine.committers[-1].commit(record)
    machine.committers[-1].discard(version.id, version.attempt)
    machine.the_store_contains_the_objects_of_the_model()
