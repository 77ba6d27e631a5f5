"""Parts of a state of which each rank has its own, restored to as many, fewer and more ranks."""

from __future__ import annotations

import random  # noqa: TID251  the generator is a subject of the test
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.state_equality import same
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import raystow
from raystow import PerRank, Rng

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


def saved(folder: Path, *states: Any) -> raystow.Version:
    """The version that these ranks save together."""
    with LocalCluster(str(folder)) as cluster:
        return cluster.save_all(list(states), step=5)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the rank of this process, and the number of ranks."""

    def set_rank(number: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return set_rank


class Loader:
    """An object with a position. ``states``: what it has loaded."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.loaded = position, list[Any]()

    def state_dict(self) -> Any:
        return {"position": self.position, "queue": [torch.arange(self.position)], "epoch": 2}

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


class Merging(Loader):
    """A loader that adds the positions of all ranks."""

    def load_rank_states(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        self.loaded.append((sum(state["position"] for state in states), [s["queue"] for s in states], rank, world_size))


def state(number: int) -> dict[str, Any]:
    """What rank ``number`` saves."""
    return {
        "w": torch.ones(8),
        "loader": PerRank(Loader(100 + number)),
        "own": PerRank({"x": torch.full((3,), float(number)), "y": [np.arange(number), np.float32(number)], "n": (number, "a")}),
        "tensor": PerRank(torch.tensor(float(number))),
        "alike": PerRank({"x": torch.arange(4), "n": 7}),
    }


def blank() -> dict[str, Any]:
    return {
        "w": torch.zeros(8),
        "loader": PerRank(Loader()),
        "own": PerRank({"x": torch.zeros(3), "y": None, "n": None}),
        "tensor": PerRank(torch.tensor(-1.0)),
        "alike": PerRank({"x": torch.zeros(4, dtype=torch.int64), "n": 0}),
    }


def check(into: dict[str, Any], number: int) -> None:
    """Raise unless ``into`` is what rank ``number`` has saved."""
    expected = state(number)
    assert same(into["w"], expected["w"])
    for name in ("own", "tensor", "alike"):
        assert same(into[name].value, expected[name].value), name
    assert same(into["loader"].value.loaded, [expected["loader"].value.state_dict()])


def test_each_rank_gets_its_own(tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    version = saved(tmp_path, *map(state, range(3)))
    for number in range(3):
        rank(number, 3)
        into = blank()
        place = into["own"].value["x"].data_ptr()
        raystow.restore(version, into)
        check(into, number)
        assert into["own"].value["x"].data_ptr() == place
    assert caplog.records == []


def test_all_values_can_be_read(tmp_path: Path) -> None:
    version = saved(tmp_path, *map(state, range(3)))
    expected = {number: state(number) for number in range(3)}
    assert same(version.per_rank("loader"), {n: of["loader"].value.state_dict() for n, of in expected.items()})
    assert same(version.per_rank("own"), {n: of["own"].value for n, of in expected.items()})
    assert same(version.per_rank("tensor"), {n: of["tensor"].value for n, of in expected.items()})
    assert same(version.per_rank("own.y.1"), {n: np.float32(n) for n in range(3)})
    assert same(version.read("own.x.[rank 2]"), torch.full((3,), 2.0))
    with pytest.raises(raystow.StateError, match="'w'"):
        version.per_rank("w")


def test_fewer_ranks_get_their_own_and_name_the_rest(tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    version = saved(tmp_path, *map(state, range(3)))
    for number in (1, 0):
        rank(number, 2)
        caplog.clear()
        raystow.restore(version, into := blank())
        check(into, number)
        assert len(caplog.records) == (number == 0)
    text = caplog.records[0].getMessage()
    for name in ("loader.position", "loader.queue.0", "own.x", "own.y.0", "own.y.1", "own.n.0", "tensor"):
        assert f"{name} (rank 2)" in text
    for name in ("alike", "loader.epoch", "own.n.1"):
        assert name not in text


def test_new_ranks_get_what_all_ranks_had(tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    version = saved(tmp_path, *map(state, range(2)))
    rank(2, 3)
    raystow.restore(version, into := blank())
    assert same(into["w"], torch.ones(8))
    assert same(into["alike"].value, state(0)["alike"].value)
    assert into["loader"].value.loaded == []
    assert same(into["own"].value, blank()["own"].value)
    assert same(into["tensor"].value, torch.tensor(-1.0))
    assert caplog.records == []
    rank(0, 3)
    raystow.restore(version, into := blank())
    check(into, 0)
    (record,) = caplog.records
    assert "rank" in record.getMessage()
    for name in ("loader.position", "own.x", "tensor"):
        assert f"{name} (ranks 0, 1)" in record.getMessage()
    assert "alike" not in record.getMessage()


def test_new_ranks_get_what_is_of_a_single_one_with_a_warning(
    tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its position in the data may have been one of its own; what objects share is not."""
    more = {"net": nn.Linear(2, 2), "merging": PerRank(Merging(3)), "rng": Rng()}
    version = saved(tmp_path, {**state(0), **more, "sched": Loader(5)})
    rank(0, 3)
    raystow.restore(version, {**blank(), **more, "sched": Loader()})
    texts = [record.getMessage() for record in caplog.records if "random streams" not in record.getMessage()]
    assert texts == [
        "ranks 1 to 2 are new: these values, which may differ between ranks, are those of the lowest rank: "
        "alike (rank 0), loader (rank 0), own (rank 0), tensor (rank 0)"
    ]


@pytest.mark.parametrize("world_size", [1, 4])
def test_an_object_merges_the_states_of_all_ranks(
    tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture, world_size: int
) -> None:
    version = saved(tmp_path, *({"loader": PerRank({"of": Merging(n)})} for n in range(2)))
    for number in range(world_size):
        rank(number, world_size)
        loader = Merging()
        raystow.restore(version, {"loader": PerRank({"of": loader})})
        assert same(loader.loaded, [(1, [[torch.arange(0)], [torch.arange(1)]], number, world_size)])
    assert caplog.records == []
    rank(1, 2)
    raystow.restore(version, {"loader": PerRank({"of": (loader := Merging())})})
    assert same(loader.loaded, [Merging(1).state_dict()])


def test_modules_may_differ_between_ranks(tmp_path: Path, rank: Any) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"part": PerRank({"net": net, "optim": optimizer})}

    states = [made(0), made(1)]
    version = saved(tmp_path, *states)
    for number in range(2):
        rank(number, 2)
        into = made(5)
        raystow.restore(version, into)
        for name in ("net", "optim"):
            assert same(
                *(
                    one["part"].value[name].state_dict()["state"]
                    if name == "optim"
                    else dict(one["part"].value[name].state_dict())
                    for one in (into, states[number])
                )
            )


def test_another_module_is_refused_before_any_is_loaded(tmp_path: Path) -> None:
    version = saved(tmp_path, {"net": PerRank(nn.Linear(2, 2)), "loader": Loader(1)})
    with pytest.raises(raystow.StateError, match=r'into\["net"\]: only this module or the saved one has bias'):
        raystow.restore(version, {"net": PerRank(nn.Linear(2, 2, bias=False)), "loader": (loader := Loader())})
    assert loader.loaded == []


def test_a_sharded_tensor_is_refused(tmp_path: Path) -> None:
    box = raystow.Box(torch.ones(2), shape=(4,), offset=(2,))
    with pytest.raises(raystow.StateError, match=r'state\["a"\]\["b"\]: a Box'):
        saved(tmp_path, {"a": PerRank({"b": box})})


def test_a_key_that_names_a_rank_is_refused(tmp_path: Path) -> None:
    for own in (torch.ones(2), np.ones(2)):
        with pytest.raises(raystow.StateError, match=r'state\["a"\]\["b"\]: key .\[rank 0\]. of a tensor'):
            saved(tmp_path, {"a": {"b": {"[rank 0]": own}}})
    version = saved(tmp_path, {"a": PerRank({"[rank 7]": torch.ones(2)}), "[rank 0]": 3})
    into = {"a": PerRank({"[rank 7]": torch.zeros(2)}), "[rank 0]": 0}
    raystow.restore(version, into)
    assert same((into["a"].value, into["[rank 0]"]), ({"[rank 7]": torch.ones(2)}, 3))  # type: ignore[attr-defined]


def test_an_object_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(raystow.StateError, match=r'state\["a"\]\["b"\]: set is not'):
        saved(tmp_path, {"a": PerRank({"b": {1}})})
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(raystow.StateError, match=r'state\["a"\]: .*sparse'):
        saved(tmp_path, {"a": PerRank(sparse)})


def draws() -> list[Any]:
    """Numbers of all generators of this process."""
    return [random.random(), random.gauss(), np.random.random(3).tolist(), np.random.standard_normal(), torch.rand(3).tolist()]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draws()


def rng_version(folder: Path, ranks: int) -> tuple[raystow.Version, list[list[Any]]]:
    """A version of these ranks' generators, and the numbers that they draw next."""
    states, expected = [], []
    for number in range(ranks):
        seed(number)
        states.append({"w": torch.ones(8), "rng": PerRank(Frozen(Rng().state_dict()))})
        expected.append(draws())
    return saved(folder, *states), expected


class Frozen:
    """A state of generators as it was."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def test_generators_of_each_rank_go_on(tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    version, expected = rng_version(tmp_path, 2)
    for number in (1, 0):
        rank(number, 2)
        seed(9)
        raystow.restore(version, {"rng": Rng(), "w": torch.zeros(8)})
        assert draws() == expected[number]
    assert caplog.records == []
    rank(0, 1)
    raystow.restore(version, {"rng": Rng(), "w": torch.zeros(8)})
    assert draws() == expected[0]
    assert [record.getMessage() for record in caplog.records] == [
        "2 ranks have saved, 1 restore: the random streams of rank 1 end"
    ]


def test_new_ranks_have_streams_of_their_own(tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    version, expected = rng_version(tmp_path, 2)
    found = []
    for number in (0, 1, 2, 3, 3, 2):
        rank(number, 4)
        seed(number + 20)
        raystow.restore(version, {"rng": Rng(), "w": torch.zeros(8)})
        found.append(draws())
    assert found[:2] == expected
    assert found[2] == found[5] != found[3] == found[4]
    for one, other in zip(found[2], found[0], strict=True):
        assert one != other
    (record,) = caplog.records
    assert "ranks 2 to 3" in record.getMessage()


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_each_generator_of_numpy_is_kept(name: str) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, name)(7))
        np.random.random(3)
        state = Rng().state_dict()
        expected = draws()
        Rng().load_state_dict(state)
        assert draws() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_state_of_something_else_is_refused() -> None:
    for bad in ({}, {"python": 1}, {**Rng().state_dict(), "torch": 3}):
        with pytest.raises(raystow.StateError, match="generators"):
            Rng().load_state_dict(bad)


def test_generators_are_saved_and_restored_last(tmp_path: Path) -> None:
    class Drawing(Loader):
        def state_dict(self) -> Any:
            torch.rand(1)
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None:
            torch.rand(1)

    def made() -> dict[str, Any]:
        return {"rng": Rng(), "loader": Drawing()}

    seed(1)
    version = saved(tmp_path, made())
    expected = draws()
    seed(2)
    raystow.restore(version, made())
    assert draws() == expected


def test_a_data_loader_of_each_rank_goes_on(tmp_path: Path, rank: Any) -> None:
    def made(number: int) -> StatefulDataLoader[Any]:
        torch.manual_seed(number)
        return StatefulDataLoader(list(range(20)), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    states, expected = [], []
    for number in range(2):
        loader = made(number)
        batches = iter(loader)
        next(batches)
        states.append(
            {"w": torch.ones(8), "loader": PerRank(Frozen(loader.state_dict())), "rng": PerRank(Frozen(Rng().state_dict()))}
        )
        expected.append([batch.tolist() for batch in [*batches, *loader]])
    version = saved(tmp_path, *states)
    for number in range(2):
        rank(number, 2)
        loader = made(7)
        raystow.restore(version, {"w": torch.zeros(8), "loader": PerRank(loader), "rng": Rng()})
        assert [batch.tolist() for _ in range(2) for batch in loader] == expected[number]


def test_a_new_iterator_does_not_disturb_the_generators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It draws seeds, in a restored process only."""

    def made() -> dict[str, Any]:
        return {"rng": Rng(), "loader": StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True)}  # type: ignore[arg-type]

    def drawn(batches: Any) -> list[Any]:
        return [(next(batches).tolist(), draws()) for _ in range(2)]

    state, again = made(), made()
    drawn(batches := iter(state["loader"]))
    version = saved(tmp_path, state)
    expected = drawn(batches)
    seed(9)
    raystow.restore(version, again)
    assert drawn(iter(again["loader"])) == expected
    assert caplog.records == []
    raystow.restore(version, again)
    (record,) = caplog.records
    assert 'an iterator of into["loader"] was made before the restore' in record.getMessage()
    assert drawn(iter(again["loader"])) == expected
