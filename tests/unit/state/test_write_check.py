"""Tensors that change between ``save`` and the end of their staging fail the save, for all kinds of writes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.state import write_check
from raystow.state.planner import Planner, SavePlan, plan_save
from raystow.state.write_check import SMALL

COUNT = SMALL // 4 + 999  # number of float32 elements: larger than the tensors that ``save`` copies


def planned(**state: Any) -> SavePlan:
    return plan_save(state, rank=0, world_size=1, planner=Planner())


def in_shared_memory(tensor: torch.Tensor) -> None:
    child = multiprocessing.get_context("fork").Process(target=tensor.numpy().fill, args=(2.5,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def with_an_optimizer(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD([tensor], lr=0.1).step()


# Writes that the version counter of torch detects may change a single element.
COUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "one element": lambda t: t.__setitem__(COUNT // 2, 7.0),
    "a view": lambda t: t[5:6].zero_(),
    "a reshaped view": lambda t: t.view(-1, 1)[3].fill_(9),
    "out=": lambda t: torch.neg(t.clone(), out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 0.5),
    "copy_": lambda t: t.copy_(torch.zeros(COUNT)),
    "an index": lambda t: t.index_fill_(0, torch.tensor([11]), 1.5),
    "detached": lambda t: t.detach().mul_(3),
    "the same values": lambda t: t.copy_(t.clone()),
}
# Torch does not count these. They are found if they change an element of the sample.
OTHERS: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda t: t.data.add_(1),
    "numpy": lambda t: np.negative(t.numpy(), out=t.numpy()),
}


@pytest.mark.parametrize("kind", [*COUNTED, *OTHERS])
def test_every_kind_of_write_is_detected(kind: str) -> None:
    tensor = torch.randn(COUNT)
    plan = planned(model={"w": tensor}, other=torch.randn(COUNT))
    assert plan.changed() == ""
    (COUNTED | OTHERS)[kind](tensor)
    assert plan.changed() == "model.w"


def test_an_optimizer_step_is_detected() -> None:
    layer = torch.nn.Linear(COUNT, 1, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, COUNT)).sum().backward()
    optimizer.step()
    plan = planned(model=layer.state_dict(), optim=optimizer.state_dict())
    optimizer.step()
    assert plan.changed() == "model.weight"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.complex128]),
    st.sampled_from(["plain", "transposed", "strided"]),
    st.sampled_from(["torch", "data", "numpy"]),
)
def test_writes_to_any_layout_are_detected(dtype: torch.dtype, layout: str, writer: str) -> None:
    whole = torch.randint(1, 100, (600, 400)).to(dtype)
    tensor = {"plain": whole, "transposed": whole.t(), "strided": whole[:, ::2]}[layout]
    plan = planned(x=tensor)
    assert plan.changed() == ""
    if writer == "numpy":
        words = tensor.view(torch.int16) if dtype is torch.bfloat16 else tensor
        words.numpy()[...] += 1
    else:
        (tensor if writer == "torch" else tensor.data).add_(1)
    assert plan.changed() == "x"


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros((), dtype=torch.int64), np.zeros((2, 3)), np.float32(0)])
def test_small_tensors_are_copied(other: Any) -> None:
    """The next forward pass changes the statistics of a batch norm, and no ``guard`` of an optimizer delays it."""
    plan = planned(x=other)
    if isinstance(other, torch.Tensor):
        other.fill_(5)
    elif other.shape:
        other.fill(5)
    assert plan.changed() == ""
    (piece,) = plan.pieces
    out = np.ones(piece.nbytes, np.uint8)
    piece.copy(out)
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.bool])
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "conjugated"])
def test_small_tensors_of_any_layout_are_copied(dtype: torch.dtype, layout: str) -> None:
    whole = torch.arange(1, 61).view(6, 10).to(dtype)
    views = {
        "transposed": whole.t(),
        "strided": whole[:, 1::3],
        "expanded": whole[:, :1].expand(6, 4),
        "conjugated": whole.conj(),
    }
    tensor, plan = views[layout], planned(x=views[layout])
    before = tensor.clone().resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()
    whole.view(torch.uint8).zero_()
    assert plan.changed() == ""
    out = np.ones(len(before), np.uint8)
    plan.pieces[0].copy(out)
    assert out.tobytes() == before


def test_a_write_to_a_small_tensor_beyond_the_copies_is_detected() -> None:
    many = {f"p{number:04}": torch.zeros(SMALL // 4) for number in range(1025)}
    plan = planned(**many)
    many["p1023"] += 1  # the last that is copied
    assert plan.changed() == ""
    many["p1024"] += 1
    assert plan.changed() == "p1024"


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def write_inference(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor[0] = 7


def mapped(tensor: torch.Tensor) -> np.memmap[Any, Any]:
    with tempfile.TemporaryFile() as file:  # the mapping outlives it
        return np.memmap(file, np.float32, shape=tuple(tensor.shape))


UNCOUNTED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], object]]] = {
    "an array": (torch.Tensor.numpy, lambda a: a.__setitem__(0, 7)),
    "a part of an array": (lambda t: np.stack([t.numpy(), t.numpy()])[:, ::2], lambda a: a.__setitem__((1, 0), 7)),
    "a mapped file": (mapped, lambda a: a.fill(3)),
    "shared memory": (shared, in_shared_memory),
    "an inference tensor": (inference, write_inference),
}


def raw(plan: SavePlan) -> bytes:
    """The bytes of a plan, as they are staged."""
    parts = [np.empty(piece.nbytes, np.uint8) for piece in plan.pieces]
    for piece, part in zip(plan.pieces, parts, strict=True):
        piece.copy(part)
    return b"".join(part.tobytes() for part in parts)


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_memory_of_which_torch_counts_no_writes_is_copied(kind: str) -> None:
    make, write = UNCOUNTED[kind]
    state = make(torch.randn(COUNT))
    before = np.asarray(state).tobytes()
    plan = planned(x=state)
    write(state)
    assert np.asarray(state).tobytes() != before
    assert not plan.writes.exposed
    assert plan.changed() == ""
    assert raw(plan) == before


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_memory_that_is_too_large_for_a_copy_is_exposed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``save`` waits until it is read then."""
    monkeypatch.setattr(write_check, "UNCOUNTED", SMALL)
    make, _ = UNCOUNTED[kind]
    assert planned(x=make(torch.randn(COUNT))).writes.exposed


def test_memory_whose_writes_torch_counts_is_not_exposed() -> None:
    weight = torch.nn.Parameter(torch.randn(COUNT))
    assert not planned(w=weight, view=weight[1:], one=torch.ones(()), none=np.zeros(0), number=np.float32(3)).writes.exposed


SWAPS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "data": lambda p: setattr(p, "data", torch.zeros(COUNT)),
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.zeros(COUNT))),
}


@pytest.mark.parametrize("kind", SWAPS)
def test_a_tensor_that_gets_other_memory_is_saved_as_it_was(kind: str) -> None:
    """As weights that are swapped with their moving average for an evaluation."""
    weight = torch.nn.Parameter(torch.randn(COUNT))
    before = weight.detach().clone()
    plan = planned(w=weight)
    SWAPS[kind](weight)
    assert plan.changed() == ""
    assert raw(plan) == before.numpy().tobytes()


class Counting(torch.nn.Module):
    """Counts in a forward pass: in a large and a small buffer, and in extra state."""

    def __init__(self, *, own_dict: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(COUNT))
        for name, size in ("large", COUNT), ("small", 3):
            self.register_buffer(name, torch.zeros(size))
        self.extra = torch.zeros(COUNT)
        if own_dict:
            self.add_module("inner", OwnDict())

    def forward(self) -> None:
        for one in self.large, self.small, self.extra:
            one += 1

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra.copy_(state)


class OwnDict(torch.nn.Module):
    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return super().state_dict(*arguments, **options)


@pytest.mark.parametrize("own_dict", [False, True])
def test_a_forward_pass_does_not_change_a_saved_module(own_dict: bool) -> None:
    module = Counting(own_dict=own_dict)
    plan = planned(model=module)
    module()
    found = {view.leaf.name: view.local for view in plan.views}
    assert found.keys() == {f"model.{name}" for name in ("weight", "large", "small", "_extra_state")}
    assert not any(found[f"model.{name}"].any() for name in ("large", "small", "_extra_state"))
    assert plan.changed() == ""
    with torch.no_grad():
        module.weight.add_(1)
    assert "model.weight" in plan.changed()
