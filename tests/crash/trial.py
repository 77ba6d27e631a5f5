"""A trial: processes do something, some are killed at one point of it, and then nothing may be lost, half there, or left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from places import Place, belonging
from processes import Zygote
from states import blank, same_bits, state_at
from tripwire import Message, Point, Target
from world import KEEP, TRAINERS, World

from raystow.orchestrator.restore import restore
from raystow.storage.errors import NotARepository, NotFound
from raystow.storage.repository import Repository, open_repository

LOST, AGAIN = 1, 2
"""Salts: of the save that is killed, and of the one after it."""


@dataclass(frozen=True)
class Act:
    """What goes on when the kill comes. ``template``: the name of the repository that it begins with. ``play`` returns what the
    training processes were told of their saves. ``keep``: the newest versions that it must leave."""

    name: str
    template: str
    play: Callable[[World], list[Message]]
    keep: int = KEEP


def _create(world: World) -> list[Message]:
    world.start("coordinator")
    world.until(lambda: world.processes["coordinator"].ready is not None, "the coordinator")
    return []


def _save(world: World) -> list[Message]:
    world.phase = "start"
    world.start_cluster()
    world.phase = "save"
    told = world.save(10, LOST)
    world.phase = "retain"
    if not world.hit:
        coordinator = world.processes["coordinator"]
        world.until(lambda: world.hit or "housed" in coordinator.said, "the retention after the commit")
    return told


def _command(*command: str) -> Callable[[World], list[Message]]:
    def play(world: World) -> list[Message]:
        operator = world.start("operator", command=[command[0], world.uri, *command[1:]])
        world.until(lambda: operator.doomed or operator.name not in world.processes, " ".join(command))
        assert operator.doomed or operator.said["exit"] == [0], world.stuck(f"raystow {command[0]} has failed")
        return []

    return play


ACTS = {
    act.name: act
    for act in (
        Act("create", "empty", _create),
        Act("save", "two", _save),
        Act("prune", "many", _command("prune", "--keep-last", "1", "--yes"), keep=1),
        Act("thin", "many", _command("prune", "--resumable", "1", "--delta", "3", "--yes"), keep=4),
        Act("compact", "many", _command("compact", "--yes"), keep=4),
        Act("gc", "littered", _command("gc", "--grace", "0s", "--yes")),
    )
}


class Missed(Exception):
    """The processes did not come by the point this time: their threads ran in another order."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Where trials are played: ``templates`` by name."""

    zygote: Zygote
    place: Place
    templates: dict[str, str]
    folder: Path

    @contextmanager
    def world(self, act: Act, name: str, *, target: Target | None = None, record: bool = False) -> Iterator[World]:
        """A world before an act."""
        logs = self.folder / f"logs-{name}"
        logs.mkdir()
        world = World(self.zygote, self.place.copy(self.templates[act.template], name), logs, target=target, record=record)
        try:
            yield world
        finally:
            world.end()

    def count(self, act: Act) -> list[Point]:
        """The points of an act."""
        with self.world(act, f"count-{act.name}", record=True) as world:
            act.play(world)
        return world.points

    def trial(self, act: Act, name: str, target: Target) -> None:
        """Kill at one point, and look whether anything is lost, half there, in the way, or left over."""
        with self.world(act, name, target=target) as world:
            before = _versions(world.uri)
            told = act.play(world)
            if not world.hit:
                raise Missed(target.name)
            known = before | {outcome["version"] for outcome in told if "version" in outcome}
            _check(world.uri, known, keep=act.keep)
            world.start_cluster()
            again = world.save(11, AGAIN)
            assert len(again) == len(TRAINERS), "a training process died of itself"
            assert all("version" in outcome for outcome in again), f"the next save failed: {again}"
            for found in world.restored:
                assert found["version"] >= max(before, default=0), f"restored an old version: {found}"
                assert found["whole"], f"restored other bits: {found}"
            world.end()
            known |= {outcome["version"] for outcome in again}
            repository = open_repository(world.uri)
            newest = repository.versions()[-1]
            assert (newest.id, newest.step, newest.metrics) == (again[0]["version"], 11, {"salt": AGAIN})
            self.place.age_leases(world.uri)
            for _ in range(2):
                repository.plan_collection(grace=0.0).execute()
            assert self.place.everything(world.uri) == belonging(repository)
            _check(world.uri, known, keep=KEEP)
            self.place.remove(world.uri)


def _versions(uri: str) -> set[int]:
    try:
        return {version.id for version in open_repository(uri).versions()}
    except NotARepository:
        return set()  # it is to be made


def _check(uri: str, known: set[int], *, keep: int) -> Repository:
    """Every version there is is whole and has the bits of its step; none is missing but those that a rule has dropped."""
    repository = open_repository(uri)
    versions = repository.versions()
    for version in versions:
        with suppress(NotFound), repository.lease(version):  # retention may be at work, and drop it before there is a lease
            repository.verify(version)
            for rank in range(len(TRAINERS)):
                state, wanted = blank(rank=rank), state_at(version.step, version.metrics["salt"], rank=rank)
                if not version.resumable:
                    del state["optimizer"], wanted["optimizer"]
                restore(version, state, rank=rank)
                assert same_bits(state, wanted), f"other bits: {version}"
    live = {version.id for version in versions}
    lost = set(sorted(known | live)[-keep:]) - live
    assert not lost, f"versions {sorted(lost)} are lost, there are {sorted(live)}"
    return repository
