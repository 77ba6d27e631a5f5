"""Operators that prune, thin, compact, collect, roll back, pin, verify or read under a lease while the coordinator commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raystow.orchestrator.restore.agreement import LocalAgreement
from raystow.storage.checks.repair import plan_repair
from raystow.storage.errors import Damaged, NotFound, RaystowError, StateError, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.format.root import Entry
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.versions.version import Version

from .invariants import Role

if TYPE_CHECKING:
    from .cluster import Cluster

_INTERVALS = {
    "prune": 1000.0,
    "thinner": 1200.0,
    "compactor": 1100.0,
    "gc": 1500.0,
    "keeper": 900.0,
    "roller": 1800.0,
    "reader": 400.0,
}


class Operator:
    """A process that repeats one kind of operation."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self.kind, self._cluster = kind, cluster
        self.role = Role(kind)
        self.process = cluster.process(kind, self.role)
        self.store, self.clock, self._rng = cluster.store(self.process), cluster.clock(self.process), cluster.rng
        self.process.spawn(self._repair if kind == "repair" else self._main)

    def _main(self) -> None:
        act: Callable[[Repository], None] = getattr(self, f"_{self.kind}")
        while True:
            self.clock.sleep(self._rng.around(_INTERVALS[self.kind]))
            try:
                act(open_repository(self._cluster.uri, clock=self.clock))
            except RaystowError as error:
                self._cluster.note(self.process, f"gives up: {error}")

    def _read_plan(self) -> None:
        """Wait as a person does who reads a plan before its execution."""
        self.clock.sleep(self._rng.choice([0.1, 60.0, 1200.0, 1200.0]))

    def _prune(self, repository: Repository) -> None:
        policy = self._rng.choice(
            [Policy(keep_last=1), Policy(keep_last=3), Policy(keep_last=2, keep_every=4), Policy(keep_best=("loss", "min", 2))]
        )
        self.role.since, self.role.keep_last = self._cluster.model.now, policy.keep_last or 0
        plan = repository.plan_retention(policy)
        self._read_plan()
        for entry in plan.execute():
            self._cluster.note(self.process, f"dropped {entry.id}")

    def _thinner(self, repository: Repository) -> None:
        self.role.resumable = self._rng.number(1, 2)
        delta, self.role.bits = self._rng.choice([(None, None), (2, None), (2, 4), (2, 4), (2, 7), (None, 4)])
        plan = repository.plan_retention(Policy(resumable=self.role.resumable, delta=delta, mantissa_bits=self.role.bits))
        self._read_plan()
        for entry in plan.thinned:
            thinning = plan.replacement(entry)
            if thinning.needed:
                self._cluster.note(self.process, f"thins {entry.id}: {'done' if thinning.execute() else 'it stays as it is'}")

    def _compactor(self, repository: Repository) -> None:
        plan = repository.plan_compaction()
        self._read_plan()
        for entry in plan.entries:
            done = plan.replacement(entry).execute()
            self._cluster.note(self.process, f"writes {entry.id} whole: {'done' if done else 'it stays as it is'}")

    def _gc(self, repository: Repository) -> None:
        self.role.since, self.role.grace = self._cluster.model.now, self._cluster.grace()
        plan = repository.plan_collection(grace=self.role.grace)
        self._read_plan()
        done = plan.execute()
        self._cluster.note(self.process, f"collected {done.objects} objects of {done.attempts} attempts, {done.scraps} scraps")

    def _keeper(self, repository: Repository) -> None:
        versions = repository.versions()
        name = self._rng.choice(["best", "release"])
        deed = self._rng.choice(["pin", "unpin", "verified"])
        if versions:
            version = self._rng.choice(versions)
            self._read_plan()
            try:
                if deed == "pin":
                    repository.pin(version, name)
                elif deed == "verified":
                    repository.record_verified(version)
            except StateError:
                return  # dropped meanwhile
        if deed == "unpin":
            repository.unpin(name)

    def _roller(self, repository: Repository) -> None:
        """Roll back by a few versions, or to a rolled-back version, and sometimes restart the training."""
        live, rolled_back = repository.versions(), repository.rolled_back()
        choices = rolled_back if rolled_back and self._rng.chance(0.4) else live[-4:]
        if not choices:
            return
        version = self._rng.choice(choices)
        self._read_plan()
        try:
            left = [one.id for one in repository.rollback(version)]
        except NotFound:
            return  # dropped meanwhile
        self._cluster.note(self.process, f"rolled back to {version.id}, from {left}")
        if self._rng.chance(0.5):
            self._cluster.restart_training()

    def _repair(self) -> None:
        """Repair the lost root, with retries until it succeeds."""
        while True:
            self.clock.sleep(30.0)
            try:
                plan = plan_repair(self.store, self.clock)
                self._read_plan()
                plan.execute()
                if not plan.needed:
                    return
            except RaystowError as error:
                self._cluster.note(self.process, f"could not repair: {error}")

    def _reader(self, repository: Repository) -> None:
        if self._rng.chance(0.5):
            self._restore_newest(repository)
        elif versions := repository.versions():
            self._read_one(repository, self._rng.choice(versions[: len(versions) // 2 + 1]))

    def _read_one(self, repository: Repository, version: Version) -> None:
        """Read any version under a lease, as an evaluation does; another operator may be about to drop it."""
        failed = self.store.failed_leases
        with repository.lease(version):
            self._leased(version.entry, failed)
            self._damage(repository, version.entry)

    def _restore_newest(self, repository: Repository) -> None:
        alone = LocalAgreement(repository, fall_back=True)
        try:
            entry = self._settled(alone, None, "")
            while entry is not None and (damage := self._damage(repository, entry)):
                entry = self._settled(alone, entry, damage)
            alone.settle(entry, "")
        finally:
            alone.give_up("")

    def _settled(self, alone: LocalAgreement, tried: Entry | None, damage: str) -> Entry | None:
        """Return the version to read next, under a lease."""
        failed, before = self.store.failed_leases, self._cluster.model.changes
        entry = alone.settle(tried, damage)
        if entry is not None:
            self._cluster.watch.histories.chosen(self.process.name, (entry.id, entry.attempt), before)
            self._leased(entry, failed)
        return entry

    def _leased(self, entry: Entry, failed: int) -> None:
        """Report a lease on this version; ``failed`` is the number of failed leases before it."""
        attempt, written = (entry.id, entry.attempt), failed == self.store.failed_leases
        self._cluster.watch.guards(self.process.name, attempt, self.store.looked, written=written)
        self._cluster.note(self.process, f"reads version {entry.id}")

    def _damage(self, repository: Repository, entry: Entry) -> str:
        """Read a version slowly, object by object; return a description of its damage, or an empty string."""
        pace = self._rng.choice([1.0, 300.0, 2000.0, 2000.0])
        version = repository.at(entry)
        try:
            wanted = [keys.fragment(entry.id, entry.attempt, f.node) for f in version.record.fragments]
            wanted += [keys.pack(entry.id, entry.attempt, *p.place) for p in version.packs]
            for key in wanted:
                self.clock.sleep(self._rng.around(pace))
                if self.store.get(key, max_bytes=1 << 20) != self._cluster.watch.expected[key]:
                    return f"{key} differs"
        except (Damaged, NotFound, StoreUnavailable) as error:
            return str(error)
        return ""
