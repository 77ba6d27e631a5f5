"""A simulated world: one seed, one store, coordinators, nodes, operators, fault rates, and their events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import RaystowError
from raystow.storage.format import keys
from raystow.storage.format.parts import part_number
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.repository import Repository, create_repository
from raystow.storage.retention.policy import Policy

from . import payload
from .clocks import SimClock
from .fault_rates import FaultRates, draw
from .faulty_store import FaultyStore
from .host import Host
from .invariants import LEASE, Role, Watch
from .journal import Journal, Violation
from .model_store import ModelStore
from .node import Node
from .operators import Operator
from .random_source import RandomSource
from .scheduler import Process, Scheduler, current

_ROUND = 30.0  # seconds between restarts of dead processes
_HOSTS = 3
_QUIET = 4800.0  # seconds after which all deadlines, leases and grace periods have ended


class Cluster:
    """A world that can be played once."""

    uri = "sim://run"

    def __init__(self, seed: int) -> None:
        root = RandomSource(seed)
        self.rng, self._tokens = root.fork("events"), root.fork("tokens")
        self.rates: FaultRates = draw(root.fork("weather"))
        shape = root.fork("shape")
        self.ranks = shape.number(1, 3)
        self._interval = shape.choice([120.0, 300.0, 700.0])
        self._hours = shape.between(2.0, 5.0)
        self.policy = shape.choice(
            [None, None, Policy(keep_last=2), Policy(keep_last=1), Policy(keep_last=2, keep_best=("loss", "min", 1))]
        )
        self.delta = root.fork("delta").choice([0, 0, 1, 3])
        self.parts: tuple[str, ...] = root.fork("parts").choice([(), (), ("buffer",), ("buffer", "rollouts")])
        self._part_faults = root.fork("part faults")
        self._second_actors, self._second_saves = self._part_faults.choice([0.0, 0.02]), self._part_faults.choice([0.0, 0.1])
        self._part_alone = self._part_faults.chance(0.5)  # after its loss it is replaced without a restart of the training
        self._restart_faults = root.fork("restart faults")
        self._lives = self._restart_faults.choice([0.0, 0.0, 0.5])
        self._short_grace = shape.chance(0.35) and not self.rates.stale
        self._kinds = [kind for kind in ("prune", "gc", "keeper", "reader", "reader", "reader") if shape.chance(0.7)]
        self._kinds += [kind for kind in ("thinner", "thinner", "compactor") if root.fork(kind).chance(0.4)]
        self._kinds += ["roller"] if root.fork("roller").chance(0.35) else []
        # A repair rebuilds the root from what it reads, so reads must not be corrupted in such a world.
        lossy = shape.chance(0.3) and not self.rates.stale and not self.rates.corrupted
        self._loss = shape.between(0.3, 0.9) * self._hours * 3600.0 if lossy else 0.0
        self.scheduler = Scheduler(root.fork("order"))
        self.journal = Journal()
        self.model = ModelStore(self.scheduler)
        self.watch = Watch(self.model)
        self.model.watch = self.watch
        self._stores: dict[Process, FaultyStore] = {}
        self._clocks: dict[Process, SimClock] = {}
        self._processes = 0
        self._hosts: list[Host] = []
        self._nodes: list[Node] = []
        self.starts = itertools.count(1)
        """Numbers of training processes."""
        self._fenced: list[Node] = []  # ranks and parts that others have taken
        self._operators: list[Operator] = []
        self._step = self._saves = self._restarts = 0
        self._faults_ended = False

    def play(self) -> None:
        """Run hours of faults, then an end without faults. A violated invariant raises ``Violation`` immediately."""
        try:
            self._play()
        finally:
            for process in self._clocks:
                process.alive = False  # what the garbage collector ends later has no effect on the next world

    def _play(self) -> None:
        self._hosts.append(Host(self))
        self._nodes = [*(Node(self, rank) for rank in range(self.ranks)), *(Node(self, 0, part) for part in self.parts)]
        for node in self._nodes:
            node.begin(0, anew=True)
        self._operators = [Operator(self, kind) for kind in self._kinds]
        self._every(_ROUND, self._supervise)
        self._every(self._interval, self._train)
        if self._loss:
            self.scheduler.after(self._loss, self._lose_root)
        self.scheduler.run(self._hours * 3600.0)
        self._end()

    def process(self, name: str, role: Role) -> Process:
        """Return a new process with a store and a clock."""
        self._processes += 1
        process = Process(self.scheduler, f"{name}.{self._processes}")
        self._stores[process] = FaultyStore(self.model, process, self.rates, self.rng, self.journal)
        self._clocks[process] = SimClock(process, self._tokens)
        self.watch.roles[process.name] = role
        return process

    def store(self, process: Process) -> FaultyStore:
        """Return the store as this process sees it."""
        return self._stores[process]

    def clock(self, process: Process) -> SimClock:
        """Return the clock of this process."""
        return self._clocks[process]

    def store_here(self, uri: str) -> FaultyStore:
        """Return the store of the calling process (replaces ``open_store``)."""
        return self._stores[current().process]

    def note(self, process: Process, what: str) -> None:
        """Add an event to the journal."""
        self.journal.note(self.scheduler.time, process.name, what)

    def some_host(self) -> Host:
        """Return the coordinator that a caller reaches, in most cases the newest."""
        alive = [host for host in self._hosts if host.process.alive] or self._hosts[-1:]
        return alive[-1] if self.rng.chance(0.85) else self.rng.choice(alive)

    @property
    def members(self) -> list[int]:
        """Return the numbers of ranks and parts."""
        return [*range(self.ranks), *map(part_number, self.parts)]

    def nodes_alive(self) -> set[str]:
        return {node.process.name for node in (*self._nodes, *self._fenced) if node.process.alive}

    def grace(self) -> float:
        """Return the grace period of a collection in seconds."""
        return self.rng.choice([0.0, 600.0, LEASE]) if self._short_grace else LEASE

    def _every(self, seconds: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if not self._faults_ended:
                action()
                self.scheduler.after(self.rng.around(seconds), again)

        self.scheduler.after(seconds, again)

    def _train(self) -> None:
        """Train one step and save it, when all ranks have restored. A part may save it twice."""
        if any(node.restored is None for node in self._nodes if not node.part):
            return
        if self._saves == 0:
            self._begin_at(
                [node.restored for node in self._nodes if node.restored is not None and node.restored.past is not None]
            )
        self._step, self._saves = self._step + 1, self._saves + 1
        for node in (*self._nodes, *self._fenced):
            if node.process.alive and node.restored is not None:
                node.save(self._step, (self._restarts, self._saves))
                if node.part and self._part_faults.chance(self._second_saves):
                    node.save(self._step, (self._restarts, self._saves))

    def _begin_at(self, restored: list[payload.Restored]) -> None:
        """Go on from the step that all ranks and parts have restored."""
        if len({one.past for one in restored}) > 1:
            raise Violation("ranks and parts restore one version", f"they have restored {restored}")
        self._step = restored[0].step

    def _supervise(self) -> None:
        """Restart dead processes, and cause the faults that are independent of store calls."""
        rng, rates = self.rng, self.rates
        alive = [host for host in self._hosts if host.process.alive]
        dead = not alive or (alive[-1].process.frozen_until > self.scheduler.time + 60 and rng.chance(0.3))  # or believed dead
        if dead or rng.chance(rates.takeovers * _ROUND / 3600):
            self._hosts.append(Host(self))
            for old in alive[: 1 - _HOSTS]:
                old.process.kill()
            self._hosts = [host for host in self._hosts if host.process.alive]
        self._operators = [o if o.process.alive else Operator(self, o.kind) for o in self._operators]
        lost = any(not node.process.alive and not (node.part and self._part_alone) for node in self._nodes)
        if lost or any(node.failed for node in self._nodes):
            self.restart_training()
        for number, node in enumerate(self._nodes):
            second = node.part and self._part_faults.chance(self._second_actors)
            if not node.process.alive or second:  # a part, without the ranks and without state
                self._fenced += [node] if second else []
                self._nodes[number] = Node(self, 0, node.part)
                self._nodes[number].begin(self._restarts, anew=True, restores=False)
        if rates.outages and rng.chance(_ROUND / 7200):
            self._outage(rng.between(20.0, 600.0))
        if rates.clock_jumps and rng.chance(_ROUND / 1800):
            process = rng.choice([p for p in self._clocks if p.alive])
            self._clocks[process].offset = rng.between(-48.0, 48.0) * 3600
            self.note(process, f"has its clock off by {self._clocks[process].offset:.0f} s")

    def _lose_root(self, newest: Host | None = None) -> None:
        """Lose the root just after a coordinator has taken charge, while no deletion is under way; start a repair."""
        if self._faults_ended:
            return
        if newest is None or not newest.process.alive:
            newest = Host(self)
            self._hosts.append(newest)
        deleting = any(h.process.alive and h.deleting for h in self._hosts) or any(s.late_deletes for s in self._stores.values())
        root = self.watch.root
        if not newest.in_charge or deleting or root is None or not root["versions"]:
            self.scheduler.after(5.0, lambda: self._lose_root(newest))
            return
        for operator in self._operators:
            if operator.kind == "gc":
                operator.process.kill()
        self.watch.lost = True
        if self.rng.chance(0.5):
            del self.model.objects["root.json"]
        else:
            self.model.rot("root.json")
        self.journal.note(self.scheduler.time, "world", "the root is lost")
        self._operators = [o for o in self._operators if o.kind != "gc"] + [Operator(self, "repair")]

    def restart_training(self) -> None:
        """Let all ranks and parts restore the newest version, after the loss of one or by hand. Some do so in the process that
        has trained before, and a frozen one may be replaced, and go on later."""
        self._step, self._saves = 0, 0
        self._restarts += 1
        for number, node in enumerate(self._nodes):
            frozen = node.process.frozen_until > self.scheduler.time + _ROUND
            if not node.process.alive or (frozen and self._restart_faults.chance(0.5)):
                self._fenced += [node] if node.process.alive else []
                node = self._nodes[number] = Node(self, node.rank, node.part)
            lives = node.restored is not None and self._restart_faults.chance(self._lives)
            node.begin(self._restarts, anew=not lives)

    def _outage(self, seconds: float) -> None:
        stores = [self._stores[process] for process in self._stores if process.alive]

        def set_all(outage: bool) -> None:
            for store in stores:
                store.outage = outage

        set_all(True)
        self.journal.note(self.scheduler.time, "store", f"is out for {seconds:.0f} s")
        self.scheduler.after(seconds, lambda: set_all(False))

    def _end(self) -> None:
        """End the world without faults: all saves end, the next save succeeds, and a collection leaves live objects only."""
        self._faults_ended = True
        self.rates.calm()
        self.journal.note(self.scheduler.time, "world", "is calm")
        for operator in self._operators:
            operator.process.kill()
        if self.watch.lost:
            Operator(self, "repair")
        for process, store in self._stores.items():
            store.outage = False
            process.thaw(now=True)
        self.scheduler.run(self.scheduler.time + _QUIET)
        for host in self._hosts:
            if host.process.alive:
                host.check_ended()
        for node in (*self._nodes, *self._fenced):
            if node.process.alive and node.saving:
                raise Violation("every save ends", f"{node.process} still saves {node.saving}")
        for host in self._hosts:
            host.process.kill()
        finisher = self.process("finisher", Role("gc"))
        done: list[str] = []
        finisher.spawn(lambda: self._finish(finisher, done))
        self.scheduler.run(self.scheduler.time + 3600)
        if not done:
            raise Violation("the world comes to an end", "the last process did not get through in an hour")
        self._check_clean()

    def _finish(self, process: Process, done: list[str]) -> None:
        clock = self.clock(process)
        try:
            repository = create_repository(self.uri, clock=clock)
            for _ in range(2):
                self.watch.roles[process.name].since = self.model.now
                repository.plan_collection().execute()
            newest = repository.latest()
            if newest is not None:
                repository.verify(newest, deep=True)
            self._save_once_more(process, repository)
        except RaystowError as error:
            raise Violation("without faults everything works", repr(error)) from error
        done.append("yes")

    def _save_once_more(self, process: Process, repository: Repository) -> None:
        clock, store, role = self.clock(process), self.store(process), self.watch.roles[process.name]
        committer = Committer(repository, f"last-{clock.token()}")
        role.epoch, role.owner = committer.epoch, committer.fence.owner
        id, attempt = committer.reserve()
        part = payload.part(0, id % payload.KINDS)
        stored = {keys.pack(id, attempt, 0, payload.GROUP, 0): part.pack, keys.fragment(id, attempt, 0): part.fragment}
        self.watch.expected |= stored
        for key, data in stored.items():
            store.put(key, [data])
        record = VersionRecord(repository.id, id, attempt, committer.epoch, self._step, created=clock.now(), world_size=1)
        committer.commit(replace(record, fragments=(part.info,), packs=None))

    def _check_clean(self) -> None:
        self.watch.whole()
        root = self.watch.root
        assert root is not None
        listed = {f"{entry['id']:08d}-{entry['attempt']}" for entry in (*root["versions"], *root["rolled_back"])}
        left = [key for key in self.model.objects if key not in ("raystow.json", "root.json") and key.split("/")[1] not in listed]
        if left or root["dropped"] or root["rewrites"] or self.model.unfinished:
            raise Violation(
                "a collection leaves what is live",
                f"{left}, {root['dropped']}, {root['rewrites']}, {list(self.model.unfinished)} are left",
            )
