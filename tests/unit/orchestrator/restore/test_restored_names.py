"""Names and structure of ``into`` against those of a version: state that has grown, names that only one side has, and values of
ranks that are gone."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.wrapper_classes import Quantized

import raystow
from raystow import Boxes


def saved(folder: Path, *states: Any) -> raystow.Version:
    """The version that these ranks save together."""
    with LocalCluster(str(folder)) as cluster:
        return cluster.save_all(list(states), step=5)


def weight(fill: float = 0.0) -> torch.Tensor:
    return torch.full((8,), float(fill))


def same(one: Any, other: Any) -> bool:
    """Equal in kinds, keys and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize("options", [{}, {"strict": False}])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], [0.5, 0.25, 0.125]),
        (None, {"epoch": 1, "rng": {"state": b"abc", "seen": [1, (2, 3)]}}),
        ([1, 2], [7, 8, 9]),
        ([1, 2, 3], [7]),
        ([1, 2], []),
        ({"a": 1}, {"b": 2, "c": []}),
        ({"a": 1}, None),
        (3, {"a": (1,)}),
        ((1, 2), (7, 8, 9)),
        ([1, 2], (7, 8)),
        ({0: 1}, {"0": 2}),
        ({"deep": [{"x": [1]}]}, {"deep": [{"x": [1, 2]}, {"y": {}}]}),
    ],
)
def test_containers_of_plain_values_are_replaced_whole(tmp_path: Path, before: Any, after: Any, options: Any) -> None:
    version = saved(tmp_path, {"w": weight(1), "x": after, "in": {"w": weight(2), "x": after}})
    into = {"w": weight(), "x": copy.deepcopy(before), "in": {"w": weight(), "x": copy.deepcopy(before)}}
    raystow.restore(version, into, **options)
    assert same(into, {"w": weight(1), "x": after, "in": {"w": weight(2), "x": after}})


def test_containers_keep_their_identity(tmp_path: Path) -> None:
    """Also inside other containers, and of subclasses; a container that is twice in ``into`` gets one value in each place."""
    after = {"list": [1, 2, 3], "dict": {"a": [4], "b": 5}, "pair": (6, [7]), "one": [1], "two": [2]}
    version = saved(tmp_path, {"x": after, "w": weight(1)})
    inner, inner_too, shared = [9], list[int](), list[int]()
    ordered = OrderedDict(a=inner)
    into: dict[str, Any] = {"list": [], "dict": ordered, "pair": Pair(0, inner_too), "one": shared, "two": shared}
    state, held = {"x": into, "w": weight()}, into["list"]
    raystow.restore(version, state)
    assert state["x"] is into
    assert (into["list"] is held, held) == (True, [1, 2, 3])
    assert into["dict"] is ordered
    assert ordered["a"] is inner
    assert (ordered, inner) == (OrderedDict(a=[4], b=5), [4])
    assert isinstance(into["pair"], Pair)
    assert (into["pair"], into["pair"].b is inner_too) == ((6, [7]), True)
    assert (into["one"], into["two"]) == ([1], [2])


@pytest.mark.parametrize("before", [0, None, raystow.AsSaved()])
@pytest.mark.parametrize(("first", "second"), [(1, 2), (0.0, -0.0), ({"x": [1]}, {"x": [2]}), (np.float32(1), np.float32(2))])
def test_a_container_at_two_places_gets_no_two_values(tmp_path: Path, before: Any, first: Any, second: Any) -> None:
    """Other than in a container of plain values, entries are replaced one by one."""
    for key, in_dict in (('["n"]', True), ("[1]", False)):

        def held(value: Any, in_dict: bool = in_dict) -> Any:
            return {"w": weight(), "n": value} if in_dict else [weight(), value]

        both = held(before)
        into = {"a": both, "deep": [{"b": both}], "w": weight()}
        version = saved(tmp_path / f"different{in_dict}", {"a": held(first), "deep": [{"b": held(second)}], "w": weight(7)})
        with pytest.raises(raystow.StateError) as caught:
            raystow.restore(version, into)
        assert str(caught.value).startswith(f'into["deep"][0]["b"]{key}: is in the same {type(both).__name__} as into["a"]{key}')
        assert same(into, {"a": held(before), "deep": [{"b": held(before)}], "w": weight()})
        equal = saved(tmp_path / f"equal{in_dict}", {"a": held(first), "deep": [{"b": held(first)}], "w": weight(7)})
        raystow.restore(equal, into)
        kept = first.item() if before == 0 and isinstance(first, np.generic) else first  # a number stays one
        assert same(into, {"a": held(kept), "deep": [{"b": held(kept)}], "w": weight(7)})


def test_keys_keep_their_order(tmp_path: Path) -> None:
    version = saved(tmp_path, {"x": {"a": 1, "b": 2, "c": 3}, "w": weight(1)})
    into = {"x": OrderedDict(c=0, gone=0, a=0), "w": weight()}
    raystow.restore(version, into)
    assert list(into["x"].items()) == [("c", 3), ("a", 1), ("b", 2)]


def test_an_error_leaves_plain_values_as_they_were(tmp_path: Path) -> None:
    version = saved(tmp_path, {"x": [7, 8, 9], "w": weight(1)})
    into = {"x": [1, 2], "w": torch.zeros(3)}
    with pytest.raises(raystow.StateError, match="version 1 holds"):
        raystow.restore(version, into)
    assert same(into, {"x": [1, 2], "w": torch.zeros(3)})


GROWN = {
    "old_dirs": [weight(1), weight(2)],
    "replay": {"frames": [(weight(3), 7), (weight(4), 8)], "pointer": 2, "array": np.arange(3), "scalar": np.float32(2)},
    "adam": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight(5)}}, "param_groups": [{"lr": 0.1}]},
}


def not_grown() -> dict[str, Any]:
    return {"old_dirs": [], "replay": None, "adam": {"state": {}, "param_groups": [{"lr": 0.0}]}}


@pytest.mark.parametrize("name", ["old_dirs", "replay", "adam"])
def test_another_structure_is_refused_and_the_remedy_works(tmp_path: Path, name: str) -> None:
    version = saved(tmp_path, {"opt": GROWN})
    into = {"opt": {**copy.deepcopy(GROWN), name: not_grown()[name]}}
    before = copy.deepcopy(into)
    place = {"adam": 'into["opt"]["adam"]["state"]'}.get(name, f'into["opt"]["{name}"]')
    with pytest.raises(raystow.StateError) as caught:
        raystow.restore(version, into)
    assert f"put raystow.AsSaved() in place of {place}" in caught.value.remedy
    assert same(into, before)
    holder = into["opt"]["adam"] if name == "adam" else into["opt"]
    holder["state" if name == "adam" else name] = raystow.AsSaved()
    raystow.restore(version, into)
    assert same(into, {"opt": GROWN})


def test_a_marker_takes_any_entry_as_it_was_saved(tmp_path: Path) -> None:
    state = {"all": GROWN, "one": weight(1), "number": 7, "empty": [], "w": weight(2)}
    version = saved(tmp_path, state)
    into = {key: raystow.AsSaved() for key in ("all", "one", "number", "empty")} | {"w": weight()}
    torch.set_default_device("meta")
    try:
        raystow.restore(version, into)
    finally:
        torch.set_default_device(None)
    assert same(into, state)
    assert into["one"].device.type == "cpu"


def test_a_marker_in_a_tuple_and_of_sharded_tensors(tmp_path: Path) -> None:
    version = saved(tmp_path, {"t": ([weight(1)], 3), "w": weight(2)}, {"t": ([weight(1)], 4), "w": weight(2)})
    into = {"t": (raystow.AsSaved(), 0), "w": raystow.AsSaved()}
    raystow.restore(version, into)
    assert same(into, {"t": ([weight(1)], 3), "w": weight(2)})


def test_a_marker_makes_no_tensor_that_consists_of_others(tmp_path: Path) -> None:
    version = saved(tmp_path, {"optim": {"m": Quantized.random((8,))}})
    into = {"optim": raystow.AsSaved()}
    with pytest.raises(raystow.StateError, match=r'into\["optim"\]\["m"\]: AsSaved cannot make'):
        raystow.restore(version, into)
    assert isinstance(into["optim"], raystow.AsSaved)


def test_a_marker_for_a_name_that_was_not_saved_is_missing(tmp_path: Path) -> None:
    version = saved(tmp_path, {"w": weight(1)})
    with pytest.raises(raystow.StateError, match=r"in `into` but not saved: replay .*allow_missing='replay'"):
        raystow.restore(version, {"w": weight(), "replay": raystow.AsSaved()})
    marker = raystow.AsSaved()
    into = {"w": weight(), "replay": marker}
    raystow.restore(version, into, allow_missing="replay")
    assert into["replay"] is marker


def test_a_marker_is_checked_and_not_saved(tmp_path: Path) -> None:
    with pytest.raises(raystow.StateError, match="AsSaved"):
        saved(tmp_path, {"w": raystow.AsSaved()})
    for device in ("nowhere", 3.5, None):
        with pytest.raises(raystow.StateError, match="device"):
            raystow.AsSaved(device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("everything", [{"strict": False}, {"allow_missing": "*", "allow_unused": "*"}])
def test_everything_that_is_left_out_is_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, everything: Any) -> None:
    caplog.set_level(logging.WARNING, logger="raystow")
    state = {"layers": {str(i): weight(i) for i in range(30)}, "epoch": 3, "lr": [0.5]}
    version = saved(tmp_path, state)
    into = {"layers": {"0": weight(), "new": weight()}, "adam": {"new": {"step": torch.tensor(0.0)}}, "seed": 1}
    raystow.restore(version, into, **everything)
    assert same(into["layers"]["0"], weight(0))
    (text,) = (record.getMessage() for record in caplog.records)
    assert "in `into` but not saved: adam.new.step, layers.new, seed" in text
    assert "saved but not in `into`: epoch, layers.1, layers.10" in text
    assert "lr.0" not in text
    assert "and 11 more" in text  # of 29 layers, epoch and lr


def test_a_restore_of_everything_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="raystow")
    state = {"w": weight(1), "n": 1}
    raystow.restore(saved(tmp_path, state), {"w": weight(), "n": 0}, strict=False)
    assert not caplog.records


def test_patterns_allow_names(tmp_path: Path) -> None:
    state = {"model": {"a.w": weight(1), "b.w": weight(2)}, "optim": {"a.w": {"m": weight(3), "step": 1}}, "epoch": 3}
    version = saved(tmp_path, state)
    into = {"model": {"a.w": weight(), "c.w": weight()}, "extra": [1]}
    with pytest.raises(raystow.StateError) as caught:
        raystow.restore(version, into)
    assert "allow_missing=['extra.0', 'model.c.w']" in caught.value.remedy
    assert "allow_unused=['epoch', 'model.b.w', 'optim']" in caught.value.remedy
    assert "strict=False" not in str(caught.value)
    missing, unused = ["extra", "model.c.w"], ["epoch", "model.b.w", "optim"]
    for wrong in ({"allow_missing": missing}, {"allow_unused": unused}, {"allow_missing": missing, "allow_unused": unused[1:]}):
        with pytest.raises(raystow.StateError):
            raystow.restore(version, into, **wrong)
    with pytest.raises(raystow.StateError) as caught:  # what is proposed replaces what was passed
        raystow.restore(version, into, allow_missing=missing, allow_unused="optim")
    assert "pass allow_unused=['optim', 'epoch', 'model.b.w']" in caught.value.remedy
    assert same(into["model"]["a.w"], weight())
    for right in (
        {"allow_missing": missing, "allow_unused": unused},
        {"allow_missing": ["ex*", "model.?.w"], "allow_unused": ["epoch", "optim.*", "*.b.w"]},
    ):
        into["model"]["a.w"].zero_()
        raystow.restore(version, into, **right)
        assert same(into["model"]["a.w"], weight(1))


@pytest.mark.parametrize("patterns", [3, [3], b"x", {"a": 1}.items()])
@pytest.mark.parametrize("argument", ["allow_missing", "allow_unused"])
def test_patterns_are_texts(tmp_path: Path, patterns: Any, argument: str) -> None:
    version = saved(tmp_path, {"w": weight(1)})
    with pytest.raises(raystow.StateError, match=argument):
        raystow.restore(version, {"w": weight()}, **{argument: patterns})


def test_proposed_patterns_work_for_odd_names(tmp_path: Path) -> None:
    version = saved(tmp_path, {"w": weight(1), "a[0]*": weight(2), "a?": 3})
    into = {"w": weight()}
    with pytest.raises(raystow.StateError, match="allow_unused") as caught:
        raystow.restore(version, into)
    proposed = ["a[?]", "a[[]0][*]"]
    assert repr(proposed) in caught.value.remedy
    raystow.restore(version, into, allow_unused=proposed)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


def loader(rank: int, *, epoch: int = 2) -> dict[str, Any]:
    return {"w": weight(1), "epoch": epoch, "loader": {"position": 100 + rank}, f"dp_rank_{rank}": {"seed": rank}}


def test_values_of_ranks_that_are_gone_are_named_and_can_be_read(
    tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    version = saved(tmp_path, *map(loader, range(4)))
    for now in (0, 1):
        rank(now, 2)
        caplog.clear()
        into = {"w": weight(), "epoch": 0, "loader": {"position": 0}, f"dp_rank_{now}": None}
        raystow.restore(version, into)
        assert same(into, loader(now))
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == (now == 0)
    rank(0, 2)
    raystow.restore(version, into := {"w": weight(), "epoch": 0, "loader": {"position": 0}, "dp_rank_0": None})
    text = caplog.records[-1].getMessage()
    assert "dp_rank_2.seed (rank 2), dp_rank_3.seed (rank 3), loader.position (ranks 2, 3)" in text
    assert "epoch" not in text
    assert "per_rank" in text
    assert version.per_rank("loader.position") == {0: 100, 1: 101, 2: 102, 3: 103}
    assert version.per_rank("loader") == {rank: {"position": 100 + rank} for rank in range(4)}
    assert version.per_rank("dp_rank_2") == {2: {"seed": 2}}
    assert version.per_rank("epoch") == dict.fromkeys(range(4), 2)
    for name in ("nothing", "w", "load"):
        with pytest.raises(raystow.StateError, match="no plain value"):
            version.per_rank(name)


def test_a_value_of_other_ranks_is_that_of_the_lowest_rank(tmp_path: Path, rank: Any) -> None:
    """As under pipeline parallelism with another number of stages. A container is that of one rank."""
    version = saved(
        tmp_path, {"w": weight(1), "stage0": [1]}, {"w": weight(1), "stage1": [2]}, {"w": weight(1), "stage1": [3, 4]}
    )
    into = {"w": weight(), "stage0": [], "stage1": []}
    raystow.restore(version, into)
    assert same(into, {"w": weight(1), "stage0": [1], "stage1": [2]})


@pytest.mark.parametrize("marked", [False, True])
def test_containers_of_other_ranks_are_complete_and_named(
    tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture, marked: bool
) -> None:
    """Each rank gets its own containers, of other keys and lengths than those of other ranks; without a warning."""
    states = [{"w": weight(1), "epoch": 2, "replay": [7] * (1 + i), f"seen{i}": {f"k{i}": i}} for i in range(2)]
    version = saved(tmp_path, *states)
    for now, world_size, expected in ((0, 1, 0), (0, 2, 0), (1, 2, 1), (0, 3, 0), (2, 3, 0)):
        rank(now, world_size)
        caplog.clear()
        into = {"w": weight(), "epoch": 0} | {
            name: raystow.AsSaved() if marked else None for name in ("replay", "seen0", "seen1")
        }
        raystow.restore(version, into)
        assert same(into, {**states[expected], "seen0": {"k0": 0}, "seen1": {"k1": 1}})
        lent = [text for record in caplog.records if "has no value of rank" in (text := record.getMessage())]
        other = 1 - now
        assert [text.partition("has one: ")[2] for text in lent] == ([f"seen{other}.k{other} (rank {other})"] if now < 2 else [])


def test_new_ranks_get_values_of_the_lowest_rank_with_a_warning(
    tmp_path: Path, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    states = [{"w": weight(1), "epoch": 2, "loader": [7] * (1 + i)} for i in range(2)]
    version = saved(tmp_path, *states)
    for now, expected in ((0, [7]), (1, [7, 7]), (2, [7])):
        rank(now, 3)
        into = {"w": weight(), "epoch": 0, "loader": []}
        caplog.clear()
        raystow.restore(version, into)
        assert into["loader"] == expected
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == (now == 0)
        assert all("loader" in text and "epoch" not in text and "lowest rank" in text for text in texts)


def test_a_rank_alone_proposes_the_checkpointer(tmp_path: Path, rank: Any) -> None:
    version = saved(tmp_path, *({"layers": {f"{i}": Boxes.of_range(weight(i + 1), (8,), 0)}} for i in range(2)))
    rank(0, 2)
    into = {"layers": {"0": weight()}}
    with pytest.raises(raystow.StateError, match=r"saved but not in `into`: layers.1") as caught:
        raystow.restore(version, into)
    assert "raystow.Checkpointer" in caught.value.remedy
    assert "allow_unused='layers.1'" in caught.value.remedy
    raystow.restore(version, into, allow_unused="layers.1")
    assert same(into["layers"]["0"], weight(1))
