"""Strict restores under pipeline parallelism: each rank has its stage, and all ranks together have every name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

import raystow
from integration import ranks
from raystow import Boxes


def stage(fill: float, *layers: int) -> dict[str, Any]:
    """The state of a rank with some layers, each of which no other rank has."""

    def tensor(layer: int) -> Boxes:
        return Boxes.of_range(torch.full((4000,), fill * (1 + layer)), (4000,), 0)

    return {
        "layers": {str(layer): {"weight": tensor(layer), "rate": fill * layer} for layer in layers},
        "step": fill,
    }


def set_stage(rank: Any, fill: float, *layers: int) -> None:
    rank.state = stage(fill, *layers)


def shown(rank: Any) -> tuple[dict[str, tuple[list[float], float]], float]:
    """Each layer's values and its rate, and the step."""
    layers = rank.state["layers"].items()
    return {name: (layer["weight"].boxes[0].local.unique().tolist(), layer["rate"]) for name, layer in layers}, rank.state["step"]


def begin(uri: str, *stages: tuple[int, ...], fill: float = 0.0) -> list[Any]:
    started = ranks.start(uri, len(stages))
    ray.get([rank.do.remote(set_stage, fill, *layers) for rank, layers in zip(started, stages, strict=True)])
    return started


def save(uri: str, *stages: tuple[int, ...]) -> None:
    saving = begin(uri, *stages, fill=1.0)
    ranks.every(saving, "save", 1)
    ranks.every(saving, "result")
    ranks.give_back()


def expected(fill: float, *layers: int) -> tuple[dict[str, tuple[list[float], float]], float]:
    return {str(n): ([fill * (1 + n)], fill * n) for n in layers}, fill


@pytest.mark.parametrize(
    "restored", [((0, 1), (2, 3)), ((2, 3), (0, 1)), ((0, 1, 2, 3),), ((0,), (1, 2), (3,)), ((0, 1, 2, 3), (2, 3))]
)
def test_all_ranks_together_have_every_name(cluster: Any, tmp_path: Path, restored: tuple[tuple[int, ...], ...]) -> None:
    uri = str(tmp_path)
    save(uri, (0, 1), (2, 3))
    into = begin(uri, *restored)
    assert {version.id for version in ranks.every(into, "restore")} == {1}
    assert ranks.every(into, "do", shown) == [expected(1.0, *layers) for layers in restored]


def test_a_name_that_no_rank_has_is_an_error_on_all(cluster: Any, tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, (0, 1), (2, 3))
    into = begin(uri, (0,), (2, 3))
    for rank in [rank.restore.remote() for rank in into]:
        with pytest.raises(RayTaskError) as caught:
            ray.get(rank, timeout=60)
        assert isinstance(caught.value.cause, raystow.StateError)
        assert "saved but not in `into`: layers.1.rate, layers.1.weight" in str(caught.value.cause)
        assert "layers.0" not in str(caught.value.cause)
        assert "allow_unused='layers.1'" in caught.value.cause.remedy
    assert ranks.every(into, "do", shown) == [expected(0.0, *layers) for layers in ((0,), (2, 3))]


def restored_in_part(rank: Any, *names: str) -> str:
    """Leave out all but some names of the state. Returns the error."""
    try:
        rank.checkpointer.restore({name: rank.state[name] for name in names})
    except raystow.RaystowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_values_are_unused_only_if_no_rank_uses_them(cluster: Any, tmp_path: Path) -> None:
    """Also if one rank uses all names."""
    uri = str(tmp_path)
    save(uri, (0,), (1,))
    first, second = begin(uri, (0, 1), (0, 1))
    assert ray.get([first.do.remote(restored_in_part, "layers", "step"), second.do.remote(restored_in_part, "layers")]) == [
        "",
        "",
    ]


def test_a_rank_is_told_why_another_one_could_not_restore(cluster: Any, tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, (0,), (1,))
    first, second = begin(uri, (0,), (1, 2))
    messages = ray.get([rank.do.remote(restored_in_part, "layers", "step") for rank in (first, second)])
    why = "version 1: in `into` but not saved: layers.2.rate, layers.2.weight (make them match, or pass allow_missing='layers.2'"
    assert messages[0].startswith(f"ClusterError: rank 1 could not restore: {why}")
    assert messages[1].startswith(f"StateError: {why}")


def restored_with_marker(rank: Any) -> Any:
    into = {**rank.state, "replay": raystow.AsSaved()}
    rank.checkpointer.restore(into, allow_missing="replay")
    return into["step"], into["replay"]


def test_a_marker_that_was_not_saved_stays(cluster: Any, tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, (0,))
    (rank,) = begin(uri, (0,))
    assert ray.get(rank.do.remote(restored_with_marker), timeout=60) == (1.0, raystow.AsSaved())
