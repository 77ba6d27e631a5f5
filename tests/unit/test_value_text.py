"""Values as one text: what a text contains, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raystow.orchestrator.save.value_text import dumps, loads
from raystow.storage.errors import Damaged, StateError


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


@pytest.mark.parametrize("text", ["{}", "[[1, 2]]", "[" * 100_000, '[["[\\"other\\"]", 1]]'])
def test_other_texts_are_damaged(text: str) -> None:
    with pytest.raises(Damaged):
        loads(text)
