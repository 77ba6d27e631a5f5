"""A state is flattened in the same way with a cached outline as without it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from raystow.state.tree import flatten
from raystow.state.tree_cache import StateCache
from raystow.storage.errors import StateError


def nested_state() -> dict[str, Any]:
    return {
        "model": OrderedDict(a=torch.zeros(3), b=torch.ones(2)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "of": []}, 1: {"step": 2, "of": {}}},
            "betas": (0.9, None, np.float32(1)),
        },
        "epoch": 1,
    }


def differs(a: Any, b: Any) -> bool:
    """Return whether the leaves differ. Values are compared by identity, since they must be the same objects."""
    return [(leaf.path, leaf.name, id(leaf.value), leaf.is_tensor) for leaf in a] != [
        (leaf.path, leaf.name, id(leaf.value), leaf.is_tensor) for leaf in b
    ]


def put(value: Any, *path: Any) -> dict[str, Any]:
    """Return the nested state with this value at a path."""
    made: Any = nested_state()
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made  # type: ignore[no-any-return]


OTHERS = {
    "the same": nested_state(),
    "other numbers": put(7, "epoch"),
    "another class": put(7.5, "epoch"),
    "a tensor where a number was": put(torch.zeros(1), "epoch"),
    "a number where a tensor was": put(1, "model", "a"),
    "a container where a leaf was": put({"x": 1}, "epoch"),
    "a leaf where a container was": put(1, "model"),
    "an empty list that has become full": put([1, 2], "optimizer", "state", 0, "of"),
    "an empty dict that has become full": put({"x": 1}, "optimizer", "state", 1, "of"),
    "a full one that has become empty": put({}, "optimizer", "state"),
    "one more": put(1, "model", "c"),
    "another order": {key: nested_state()[key] for key in ("epoch", "model", "optimizer")},
    "another key": {**{("epochs" if k == "epoch" else k): v for k, v in nested_state().items()}},
    "a list for a tuple": put([0.9, None, np.float32(1)], "optimizer", "betas"),
    "a longer tuple": put((0.9, None, np.float32(1), 1), "optimizer", "betas"),
    "another dict": put({"a": torch.zeros(3), "b": torch.ones(2)}, "model"),
    "nothing": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_leaves_equal_flatten_after_any_earlier_state(name: str) -> None:
    outline, other = StateCache(), OTHERS[name]
    for taken in (nested_state(), other, other, nested_state()):
        assert not differs(outline.leaves(taken), flatten(taken))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (put({1, 2}, "epoch"), "is not a tensor"),
        (put({0: {"step": torch.tensor(1.0), "of": []}, True: {"step": 2, "of": {}}}, "optimizer", "state"), "neither a string"),
        (put({0.0: {"step": torch.tensor(1.0), "of": []}, 1: {"step": 2, "of": {}}}, "optimizer", "state"), "neither a string"),
        ([1], "is not a dict"),
    ],
)
def test_an_unsupported_value_at_a_known_path_is_refused(other: Any, what: str) -> None:
    outline = StateCache()
    outline.leaves(nested_state())
    for _ in range(2):
        with pytest.raises(StateError, match=what):
            outline.leaves(other)
    assert not differs(outline.leaves(taken := nested_state()), flatten(taken))


def test_a_container_that_now_contains_itself_is_refused() -> None:
    outline, bad = StateCache(), nested_state()
    outline.leaves(bad)
    bad["optimizer"]["state"][0]["of"] = bad["optimizer"]
    with pytest.raises(StateError, match="contains itself"):
        outline.leaves(bad)
    inner = nested_state()
    inner["model"] = inner
    with pytest.raises(StateError, match="contains itself"):
        outline.leaves(inner)


def test_a_state_of_the_same_outline_is_not_flattened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outline = StateCache()
    outline.leaves(nested_state())
    monkeypatch.setattr("raystow.state.tree_cache.flatten", lambda state: pytest.fail("the state is flattened again"))
    assert not differs(outline.leaves(taken := nested_state()), flatten(taken))


def test_the_cache_keeps_no_tensors() -> None:
    outline, taken = StateCache(), nested_state()
    outline.leaves(taken)
    kept = copy.copy(outline.__dict__)
    tensors = {id(leaf.value) for leaf in flatten(taken) if leaf.is_tensor}

    def held(node: Any) -> set[int]:
        found = {id(node)}
        if isinstance(node, dict | list | tuple):
            for child in node.values() if isinstance(node, dict) else node:
                found |= held(child)
        return found

    assert not held(kept) & tensors
