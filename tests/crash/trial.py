"""A trial: processes work, some are killed at one point, and then nothing may be lost, incomplete or left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crash.processes import Zygote
from crash.trial_cluster import CLUSTER, KEEP, TRAINERS, WORLD_SIZE, TrialCluster
from crash.trial_journal import EVERY
from crash.trial_state import PART_RANK, blank, same_bits, state_at
from crash.trial_store import Place, belonging
from crash.tripwire import Message, Point, Target
from raystow.orchestrator.restore.plan import silent
from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
from raystow.storage.commit.segments import read_record, verify_segment
from raystow.storage.errors import NotARepository, NotFound
from raystow.storage.format.parts import part_key
from raystow.storage.repository import Repository, open_repository

_FIRST = 2
"""The step of the newest version before the recorded steps."""
LOST, AGAIN = 1, 2
"""Salts of the interrupted save and of the next save."""


@dataclass(frozen=True)
class Act:
    """The work during which a kill happens.

    ``template``: the name of the repository at the start. ``play`` returns the outcomes of saves that the training processes
    received. ``keep``: the number of newest versions that must remain. ``rolled_back_to``: the newest version after the act, if
    it is complete. ``journal``: the training records its steps; points before the recording are not tried. ``parts``: it has a
    part.
    """

    name: str
    template: str
    play: Callable[[TrialCluster], list[Message]]
    keep: int = KEEP
    rolled_back_to: int = 0
    journal: bool = False
    parts: bool = False


def _create(cluster: TrialCluster) -> list[Message]:
    cluster.start("coordinator")
    cluster.until(lambda: cluster.processes["coordinator"].ready is not None, "the coordinator")
    return []


def _save(cluster: TrialCluster) -> list[Message]:
    cluster.phase = "start"
    cluster.start_cluster()
    cluster.phase = "save"
    outcomes = cluster.save(10, LOST)
    cluster.phase = "retain"
    if not cluster.hit:
        coordinator = cluster.processes["coordinator"]
        cluster.until(lambda: cluster.hit or "housed" in coordinator.said, "the retention after the commit")
    return outcomes


def _record(cluster: TrialCluster) -> list[Message]:
    """Make two segments durable. After a kill, the training restarts at a step that is not before them, and makes another
    segment durable; after a loss of all processes, it continues at the last durable step."""
    cluster.phase = "start"
    cluster.start_cluster()
    cluster.phase = "journal"
    for step in (4, 6):
        if not cluster.hit:
            cluster.record(step)
    if cluster.hit:
        cluster.restart(TRAINERS)
        durable, (step, _) = _durable(cluster.uri), cluster.steps()
        assert _FIRST <= durable <= step <= 6, f"steps up to {durable} were durable, and the training continues after {step}"
        cluster.record(step := EVERY * (step // EVERY + 1))
        assert _durable(cluster.uri) == step, f"the segment after the kill is not durable: {cluster.stuck('')}"
        cluster.restart(CLUSTER)
        assert set(cluster.steps()) == {step}, f"steps up to {step} are durable, and ranks continue after {cluster.steps()}"
    return []


def _durable(uri: str) -> int:
    """Return the newest step in the store, and assert that every segment is whole."""
    repository = open_repository(uri)
    root = repository.root()
    for segment in root.segments:
        record = read_record(repository.store, repository.id, segment, repository.trust)
        verify_segment(repository.store, record, deep=True)
    return max(entry.step for entry in (*root.versions[-1:], *root.segments))


def _command(*command: str) -> Callable[[TrialCluster], list[Message]]:
    def play(cluster: TrialCluster) -> list[Message]:
        operator = cluster.start("operator", command=[command[0], cluster.uri, *command[1:]])
        cluster.until(lambda: operator.doomed or operator.name not in cluster.processes, " ".join(command))
        assert operator.doomed or operator.said["exit"] == [0], cluster.stuck(f"raystow {command[0]} has failed")
        return []

    return play


ACTS = {
    act.name: act
    for act in (
        Act("create", "empty", _create),
        Act("save", "two", _save),
        Act("parts", "parts", _save, parts=True),
        Act("journal", "two", _record, journal=True),
        Act("prune", "many", _command("prune", "--keep-last", "1", "--yes"), keep=1),
        Act("thin", "many", _command("prune", "--resumable", "1", "--delta", "3", "--yes"), keep=4),
        Act("compact", "many", _command("compact", "--yes"), keep=4),
        Act("rollback", "many", _command("rollback", "2"), keep=4, rolled_back_to=2),
        Act("gc", "littered", _command("gc", "--grace", "0s", "--yes")),
    )
}


class Missed(Exception):
    """The processes did not reach the point, because their threads ran in another order."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A place at which trials run. ``templates``: the repositories at the start, by name."""

    zygote: Zygote
    place: Place
    templates: dict[str, str]
    folder: Path

    @contextmanager
    def cluster(self, act: Act, name: str, *, target: Target | None = None, record: bool = False) -> Iterator[TrialCluster]:
        """Yield a cluster before an act."""
        logs = self.folder / f"logs-{name}"
        logs.mkdir()
        cluster = TrialCluster(
            *(self.zygote, self.place.copy(self.templates[act.template], name), logs),
            target=target,
            record=record,
            journal=act.journal,
            parts=act.parts,
        )
        try:
            yield cluster
        finally:
            cluster.end()

    def count(self, act: Act) -> list[Point]:
        """The points of an act."""
        with self.cluster(act, f"count-{act.name}", record=True) as cluster:
            act.play(cluster)
        return [point for point in cluster.points if not act.journal or point.phase != "start"]

    def trial(self, act: Act, name: str, target: Target) -> None:
        """Kill at one point, and assert that nothing is lost, incomplete or left behind."""
        with self.cluster(act, name, target=target) as cluster:
            before = _versions(cluster.uri)
            outcomes = act.play(cluster)
            if not cluster.hit:
                raise Missed(target.name)
            known = before | {outcome["version"] for outcome in outcomes if "version" in outcome}
            _check(cluster.uri, known, keep=act.keep)
            oldest = max(before, default=0)
            if act.rolled_back_to:
                oldest = _newest(cluster.uri)
                assert oldest in (act.rolled_back_to, max(before)), f"half of a rollback: {oldest}"
            cluster.start_cluster()
            later = cluster.save(11, AGAIN)
            again = [outcome for outcome in later if outcome["step"] == 11]
            assert len(again) == len(cluster.training), "a training process died without a kill"
            assert all("version" in outcome for outcome in again), f"the next save failed: {again}"
            for found in cluster.restored:
                assert found["version"] >= oldest, f"restored an old version: {found}"
                assert found["version"] == oldest or not act.rolled_back_to, f"restored a rolled-back version: {found}"
                assert found["whole"], f"restored other bits: {found}"
            cluster.end()
            known |= {outcome["version"] for outcome in again}
            repository = open_repository(cluster.uri)
            saved = {version.step: version.id for version in repository.versions()}
            outcomes = [outcome for outcome in (*outcomes, *later) if outcome["step"] == 10]
            false = [outcome for outcome in outcomes if outcome.get("failed") and 10 in saved]
            assert not false, f"version {saved.get(10)} exists, but a rank got the answer that its save failed: {false}"
            newest = repository.versions()[-1]
            assert (newest.id, newest.step, newest.metrics) == (again[0]["version"], 11, {"salt": AGAIN})
            self.place.age_leases(cluster.uri)
            for _ in range(2):
                repository.plan_collection(grace=0.0).execute()
            assert self.place.everything(cluster.uri) == belonging(repository)
            _check(cluster.uri, known, keep=KEEP)
            self.place.remove(cluster.uri)


def _versions(uri: str) -> set[int]:
    """Return the ids of the listed versions."""
    try:
        return {entry.id for entry in open_repository(uri).root().listed}
    except NotARepository:
        return set()  # the act creates it


def _newest(uri: str) -> int:
    newest = open_repository(uri).latest()
    assert newest is not None
    return newest.id


def _check(uri: str, known: set[int], *, keep: int) -> Repository:
    """Assert that every version is whole and has the bits of its step, that either all or none have parts, and that only versions
    dropped by a rule are missing."""
    repository = open_repository(uri)
    versions = [*repository.versions(), *repository.rolled_back()]
    assert len({(*version.parts(),) for version in versions}) <= 1
    for version in versions:
        with suppress(NotFound), repository.lease(version):  # retention may drop the version before the lease exists
            repository.verify(version)
            for rank in (*range(WORLD_SIZE), *[PART_RANK] * len(version.parts())):
                state, expected = blank(rank=rank), state_at(version.step, version.metrics["salt"], rank=rank)
                if not version.resumable:
                    del state["optimizer"], expected["optimizer"]
                if rank == PART_RANK:
                    plan_restore(version, {part_key("buffer"): state}, RestoreOptions(part="buffer")).execute(silent)
                else:
                    plan_restore(version, state, RestoreOptions(rank)).execute(silent)
                assert same_bits(state, expected), f"other bits: {version}"
    listed = {version.id for version in versions}
    lost = set(sorted(known | listed)[-keep:]) - listed
    assert not lost, f"versions {sorted(lost)} are lost, there are {sorted(listed)}"
    return repository
