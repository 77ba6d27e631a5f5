"""What is waited for when a node is going to be taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch
from fake_clock import FakeClock
from local_cluster import LocalCluster

from raystow.orchestrator.coordinator.drain import Drained, drain
from raystow.storage.errors import ClusterError, DeadlineExceeded
from raystow.workers.node.node import Node
from raystow.workers.node.save_progress import SavesHere
from raystow.workers.protocol.messages import Saves


def looks(*states: dict[str, Saves]) -> Callable[[], dict[str, Saves]]:
    """What the node worker answers, call by call; the last for ever."""
    answers: Iterator[dict[str, Saves]] = chain(states, repeat(states[-1]))
    return lambda: next(answers)


def nothing() -> None: ...


def test_a_save_that_was_under_way_is_not_enough() -> None:
    clock = FakeClock()
    under_way, late = {"run": Saves(2, 1)}, {"run": Saves(3, 2)}
    done = drain(looks(under_way, under_way, {"run": Saves(2, 2)}, late, {"run": Saves(3, 3)}), nothing, clock, seconds=60)
    assert done == Drained(durable=("run",), left=())
    assert clock.time == 1.5


def test_the_notice_comes_before_any_wait() -> None:
    """And after the first look at the cluster."""
    looked, told = list[int](), list[int]()  # looks; looks there had been when it was told

    def saves() -> dict[str, Saves]:
        looked.append(1)
        return {"run": Saves(2, 2) if told else Saves(1, 1)}

    drain(saves, lambda: told.append(len(looked)), FakeClock(), seconds=60)
    assert told == [1]


def test_training_that_ends_is_not_waited_for() -> None:
    assert drain(looks({"run": Saves(2, 2)}, {}), nothing, FakeClock(), seconds=60) == Drained(durable=(), left=("run",))


def test_every_repository_is_waited_for() -> None:
    clock = FakeClock()
    both = {"a": Saves(1, 1), "b": Saves(1, 1)}
    states = looks(both, both, both | {"b": Saves(2, 2)}, both | {"b": Saves(2, 2)}, {"a": Saves(2, 2), "b": Saves(2, 2)})
    assert drain(states, nothing, clock, seconds=60) == Drained(durable=("a", "b"), left=())


def test_a_rank_without_a_save_has_30_s_to_begin() -> None:
    clock = FakeClock()
    states = looks(*[{}] * 40, {"run": Saves(1, 0)}, {"run": Saves(1, 1)})
    assert drain(states, nothing, clock, seconds=300) == Drained(durable=("run",), left=())
    assert drain(looks({}), nothing, clock := FakeClock(), seconds=300) == Drained(durable=(), left=())
    assert clock.time == 30


def test_where_there_is_no_node_worker_nobody_saves() -> None:
    clock = FakeClock()
    assert drain(lambda: None, nothing, clock, seconds=300) == Drained(durable=(), left=())
    assert clock.time == 0


def test_a_node_worker_that_was_restarted_counts_anew() -> None:
    states = looks({"run": Saves(7, 7)}, {"run": Saves(1, 0)}, {"run": Saves(1, 1)})
    assert drain(states, nothing, FakeClock(), seconds=60).durable == ("run",)


def test_it_waits_no_longer_than_the_node_lives() -> None:
    clock = FakeClock()
    with pytest.raises(DeadlineExceeded, match="within 60 s") as raised:
        drain(looks({"run": Saves(2, 2)}), nothing, clock, seconds=60)
    assert raised.value.subject == "run"
    assert clock.time == 60


def test_a_notice_that_ray_does_not_take_is_an_error() -> None:
    def refuse() -> None:
        raise ClusterError("no such node")

    with pytest.raises(ClusterError):
        drain(looks({"run": Saves(1, 1)}), refuse, FakeClock(), seconds=60)


def test_a_node_counts_the_saves_of_the_ranks_connected() -> None:
    with LocalCluster("memory://progress") as cluster:
        cluster.save_all([{"w": torch.ones(3)}] * 2, step=1)
        cluster.save_all([{"w": torch.ones(3)}] * 2, step=2)
        (node,) = cluster._nodes
        assert isinstance(node, Node)
        assert node.saves() == {"memory://progress": Saves(2, 2)}


def test_only_ranks_that_are_connected_count() -> None:
    saves = SavesHere()
    with saves.rank("run"):
        with saves.rank("run"):
            saves.settle("run", saves.begin("run"))
            saves.begin("run")
        assert saves.now() == {"run": Saves(2, 1)}
    assert saves.now() == {}
