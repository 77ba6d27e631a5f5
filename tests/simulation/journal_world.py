"""A simulated training with a step journal on nodes that die: real stores, replicators and agreements, and modelled ranks.

The state after a step is a digest of the state before it and of a random number, so a repeated step leads to another state. An
entry contains both states: so a replay that mixes the entries of two histories is detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from helpers.fake_clock import FakeClock

from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.storage.coding.digest import stored_digest
from raystow.storage.errors import ClusterError
from raystow.workers.journal.entry_replicator import EntryReplicator
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.protocol.messages import (
    START,
    EntryInfo,
    EntryKept,
    EntryPlace,
    Generation,
    Incarnation,
    JournalVote,
    PutEntry,
)

from .journal import Violation
from .random_source import RandomSource

_R = "repository"
_STATE = 8  # bytes


class WorldPeers:
    """``NodePeers``, as far as the journal uses them, of the simulated nodes."""

    def __init__(self, alive: Mapping[str, JournalNode]) -> None:
        self._alive = alive

    def nodes(self) -> Mapping[str, str]:
        return {name: name for name in self._alive}

    def put_entry(self, node: str, put: PutEntry) -> EntryKept:
        if node not in self._alive:
            raise ClusterError("is dead", subject=node)
        store = self._alive[node].store
        store.drop_before(put.info, put.oldest)
        data = self._alive[put.holder].store.view(put.info)
        if data is None:
            return EntryKept(put.info.step, 0, "has dropped it", memory=self._alive[node].memory)
        problem = store.add(put.info, data, own=False)
        return EntryKept(put.info.step, 1, problem, memory=self._alive[node].memory)


class JournalNode:
    """A node with its memory of entries."""

    def __init__(self, name: str, world: JournalWorld) -> None:
        self.name, self.store, self.memory = name, EntryStore(1 << 20), world.clock.token()
        self.replicator = EntryReplicator(name, self.store, WorldPeers(world.nodes), world.clock)
        self.replicator.want(_R, 1)


@dataclass
class ModelRank:
    """A model of a rank's ``Journal``: ``record`` returns when the entries of earlier steps have their copies.

    Args:
        outbox: Entries that have not been sent to the node.
        in_flight: Steps whose entries are not known to have copies.
        returned: The last step whose ``record`` has returned.
        chained: Whether steps are recorded. False after an entry was lost, until the next save.
    """

    number: int
    node: JournalNode
    returned: int
    outbox: list[tuple[EntryInfo, bytes]] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    chained: bool = True

    def kept(self, kept: EntryKept) -> None:
        self.in_flight.discard(kept.step)


class JournalWorld:
    """A world in which ``play`` runs random events; a violated invariant raises ``Violation``.

    ``digests``: a replay ends at the version if the first entry starts from another state. This happens rarely: entries of an
    abandoned history may remain on unreachable nodes, and a version does not record its history.
    """

    def __init__(self, seed: int, *, digests: bool = True) -> None:
        self._digests = digests
        self.rng, self.clock = RandomSource(seed), FakeClock()
        self.nodes: dict[str, JournalNode] = {}
        self.replayed = self.deaths = 0
        self._names = 0
        self._rounds = JournalRounds(self.clock)
        self._states = {START: b"\0" * _STATE}  # by step, of the current history
        self._version, self._saves = START, list[tuple[int, bytes]]()
        self._saved = {START: self._states[START]}
        self._copies = 0  # known copies of the entries of completed steps
        self._gap = START  # the last step whose entries were lost or not recorded
        self._single = START  # the newest step whose entries lost a copy when a node worker ended
        for _ in range(self.rng.number(2, 4)):
            self._add_node()
        self._start()

    def play(self, events: int) -> None:
        """Run a number of random events, then close all stores."""
        try:
            for _ in range(events):
                self._event()
        finally:
            for node in self.nodes.values():
                node.store.close()

    def _event(self) -> None:
        self.clock.sleep(self.rng.around(0.2))
        draw = self.rng.number(0, 99)
        if draw < 50:
            self.rng.choice([*self.nodes.values()]).replicator.step()
        elif draw < 70:
            self._deliver(self.rng.choice(self.ranks))
        elif draw < 92:
            self._train()
        elif draw < 94:
            self._save()
        elif draw < 96:
            self._make_durable()
        elif draw < 97:
            self._settle()
        elif draw < 98:
            self._restart_worker()
        else:
            self._fail(kill=self.rng.chance(0.7))

    def _add_node(self) -> None:
        self._names += 1
        name = f"n{self._names}"
        self.nodes[name] = JournalNode(name, self)

    def _deliver(self, rank: ModelRank) -> None:
        """Deliver one entry to the node of a rank."""
        if rank.outbox:
            info, data = rank.outbox.pop(0)
            problem = rank.node.store.add(info, data, own=True)
            assert not problem
            rank.node.replicator.submit(info, rank.kept)

    def _train(self) -> None:
        """Let one ``record`` return, or train the next step if all have returned (a step needs the gradients of all ranks)."""
        rank = self.rng.choice(self.ranks)
        if rank.returned < self._step:
            if not any(step < self._step for step in rank.in_flight):
                rank.returned = self._step
            return
        if any(one.returned < self._step for one in self.ranks):
            return
        before, previous = self._states[self._step], self._step
        self._step += 1
        after = self._states[self._step] = stored_digest(before, self.rng.token().encode())[:_STATE]
        for one in self.ranks:
            if one.chained:
                info = EntryInfo(_R, one.number, len(self.ranks), self._step, previous, self._lineage, 2 * _STATE)
                one.outbox.append((info, before + after))
                one.in_flight.add(self._step)
            else:
                self._gap = self._step

    def _save(self) -> None:
        """Save the state of all ranks after a step that all have recorded."""
        if self._step > self._version and all(rank.returned == self._step for rank in self.ranks):
            self._saves.append((self._step, self._states[self._step]))
            for rank in self.ranks:
                rank.node.store.save_begun(_R, self._step, self._lineage[-1])
                rank.chained = True

    def _make_durable(self) -> None:
        """Make the oldest save a version; some nodes are not notified."""
        if self._saves:
            self._version, state = self._saves.pop(0)
            self._saved = {self._version: state}
            for node in self.nodes.values():
                if self.rng.chance(0.8):
                    node.store.committed(_R, self._version)

    def _settle(self) -> None:
        """Let time pass until all entries are copied."""
        for rank in self.ranks:
            while rank.outbox:
                self._deliver(rank)
        for _ in range(3):
            self.clock.sleep(31)  # longer than the wait before a retry
            for node in self.nodes.values():
                while not node.replicator.step():
                    pass
        if self._single <= self._version:
            self._copies = 2

    def _restart_worker(self) -> None:
        """Restart a node worker without its entries; ranks with entries under way to it lose them and stop recording."""
        old = self.rng.choice([*self.nodes.values()])
        new = self.nodes[old.name] = JournalNode(old.name, self)
        old.store.close()
        self._copies, self._single = max(self._copies - 1, 0), self._step
        for rank in self.ranks:
            if rank.node is old:
                rank.node = new
                if rank.in_flight or rank.outbox:
                    rank.chained, self._gap = False, self._step
                rank.outbox.clear()
                rank.in_flight.clear()

    def _fail(self, *, kill: bool) -> None:
        """End and restart all ranks; with ``kill`` the node of one rank has died."""
        done = min(rank.returned for rank in self.ranks)
        safe = self._copies > kill and self._gap <= self._version
        if kill:
            dead = self.nodes.pop(self.rng.choice(self.ranks).node.name)
            dead.store.close()
            self.deaths += 1
        else:
            for rank in self.ranks:
                if self.rng.chance(0.5):  # an entry that was sent before the end arrives
                    self._deliver(rank)
        while len(self.nodes) < 2 or (len(self.nodes) < 5 and self.rng.chance(0.5)):
            self._add_node()
        self._start()
        if safe and self._step < max(done - 1, self._version):
            raise Violation("a failure costs one step at most", f"all had ended step {done}, and go on from step {self._step}")

    def _start(self) -> None:
        """Start a random number of ranks on random nodes: replay the entries after the version and continue."""
        world = self.rng.number(1, 3)
        incarnation, base = Incarnation(_R, 1, 1, self.clock.token(), "simulated"), self._version
        votes = [JournalVote(rank, world, incarnation, 1, 600.0, base) for rank in range(world)]
        survey = {name: node.store.holdings(_R) for name, node in self.nodes.items()}
        for vote in votes:
            round = self._rounds.vote(vote, lambda: survey)
        places = [self.rng.choice([*self.nodes.values()]) for _ in votes]
        reached = {self._replayed(round.answer(vote).entries, node) for vote, node in zip(votes, places, strict=True)}
        if len(reached) > 1:
            raise Violation("all ranks replay the same line", str(sorted(reached)))
        ((step, state),) = reached
        self._states = {step: state}
        for vote in votes:
            last = JournalVote(*(vote.rank, world, incarnation, 1, 600.0, base), reached=step)
            round = self._rounds.vote(last, lambda: survey)
        self._lineage: tuple[Generation, ...] = round.answer(last).lineage
        self._step, self._saves, self._copies = step, [], 0
        self._gap = self._single = START
        self.ranks = [ModelRank(vote.rank, node, step) for vote, node in zip(votes, places, strict=True)]

    def _replayed(self, entries: tuple[EntryPlace, ...], node: JournalNode) -> tuple[int, bytes]:
        """Fetch all entries to the node of a rank and replay them; return the last step and its state."""
        step, state = self._version, self._saved[self._version]
        for info, names in ((place.info, place.nodes) for place in entries):
            data = self.nodes[names[0]].store.view(info)
            assert data is not None
            before, after = bytes(data[:_STATE]), bytes(data[_STATE:])
            node.store.add(info, data, own=True)
            node.replicator.wake()
            if info.step == step and after == state:
                continue  # the same step, recorded by another rank
            if (info.previous, before) != (step, state):
                if self._digests and step == self._version:
                    break
                raise Violation("lines of history are not mixed", f"the entry of step {info.step} follows another step {step}")
            step, state = info.step, after
            self.replayed += 1
        return step, state
