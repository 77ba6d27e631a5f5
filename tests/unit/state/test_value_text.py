"""Values as one text: what a text contains, and what is refused."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raystow.state import value_text
from raystow.state.value_text import dumps, loads
from raystow.storage.errors import Damaged, StateError
from raystow.storage.format import json_text


def test_values_keep_their_types() -> None:
    value = {"number": np.float64(2.5), "array": np.array(2.5), "tensor": torch.tensor([1.5]), "tuple": (1, [None]), "empty": {}}
    found = loads(dumps(value))
    assert isinstance(found, dict)
    assert {key: type(item) for key, item in found.items()} == {key: type(item) for key, item in value.items()}
    assert (found["number"], found["array"], found["tensor"].item(), found["tuple"]) == (2.5, 2.5, 1.5, (1, [None]))


def test_a_part_of_a_tensor_is_refused() -> None:
    """All ranks would restore the part of one of them."""
    mesh = DeviceMesh("cpu", torch.arange(2, dtype=torch.int), _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32))
    part = DTensor(torch.ones(2, 3), spec, requires_grad=False)
    with pytest.raises(StateError, match=r'state.*"average".*a DTensor of which each rank has a part'):
        dumps({"average": part}, what="state")


def test_large_tensors_are_refused() -> None:
    large = torch.empty(()).expand(33, 1 << 20, 2)  # takes no memory
    with pytest.raises(StateError, match="state: has more than 256 MiB of tensors"):
        dumps({"average": large}, what="state")


HUGE = [f'["q",[{2**70},[]]]', f'["n",["float32",[{2**70}],""]]', '["n",["float32",[4611686018427387904,4,0],""]]']


@pytest.mark.parametrize("text", ["{}", "[[1, 2]]", "[" * 100_000, '[["[\\"other\\"]", 1]]', *HUGE])
def test_other_texts_are_damaged(text: str) -> None:
    with pytest.raises(Damaged):
        loads(text)


def test_more_values_than_can_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (value_text, json_text):
        monkeypatch.setattr(module, "MAX_ITEMS", 100)
    text = dumps(["[,{" * 100, '"\\\\[', *range(90)])  # brackets in texts take no memory of their own
    assert loads(text) == ["[,{" * 100, '"\\\\[', *range(90)]
    with pytest.raises(StateError, match="has 102 values; 100 can be stored"):
        dumps(list(range(100)), what="state")
    with pytest.raises(Damaged):
        loads(f'["l",[{"[]," * 60}0]]')


class Mode(str, enum.Enum):
    MIN = "min"


def test_containers_and_keys_keep_their_types() -> None:
    value = {
        "milestones": Counter({2: 1, 4: 2}),
        "keys": {1: "a", "1": "b", (2, None): "c", 1.5: "d", True is None: "e", None: "f"},
        "ordered": OrderedDict(b=1, a=2),
        "lists": defaultdict(list, {3: [4]}),
        "plain": defaultdict(None, {3: 4}),
        "sets": ({1, 2}, frozenset({"x"})),
        "last": deque([1, 2], 3),
        "numbers": [float("inf"), float("-inf"), -0.0, 1 << 70, 3j, b"\0", "\ud800", True, None],
        "empty": (set(), (), {}, []),
    }
    found = loads(dumps(value))
    assert repr(found) == repr(value)
    assert found["lists"][9] == []


def test_values_of_subclasses_come_back_as_equal_ones() -> None:
    value = {"mode": Mode.MIN, "text": np.str_("x"), "size": torch.Size([2])}
    found = loads(dumps(value))
    assert found == value
    assert [type(one) for one in found.values()] == [str, str, tuple]


@pytest.mark.parametrize(
    "value", [object(), torch.float32, torch.Generator(), np.array(["x"]), defaultdict(lambda: 1), Path("x")]
)
def test_values_that_cannot_be_stored_are_shown_by_path(value: object) -> None:
    with pytest.raises(StateError, match=r'state\["a"\]\[0\]\[2\]: .* cannot be stored'):
        dumps({"a": [{2: value}]}, what="state")


def test_texts_of_older_entries_are_read() -> None:
    """Each plain value was a node with a tag."""
    assert loads('["d",[[["v","a"],["l",[["v",1],["t",[["v",null]]]]]]]]') == {"a": [1, (None,)]}
