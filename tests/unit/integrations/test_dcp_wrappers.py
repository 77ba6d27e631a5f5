"""DCP with boxes and with tensors that consist of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.wrapper_classes import Opaque, Quantized
from torch.testing._internal.two_tensor import TwoTensor

import raystow
from raystow import Box, Boxes
from raystow.dcp import Reader, Writer


def save(state: dict[str, Any], uri: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(uri), no_dist=True, **options)


def load(state: dict[str, Any], uri: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=Reader(uri), no_dist=True, **options)


def failure(state: dict[str, Any], uri: Path, **options: Any) -> str:
    with pytest.raises(dcp.api.CheckpointException) as error:
        load(state, uri, **options)
    ((raised, _),) = error.value.failures.values()
    assert isinstance(raised, raystow.StateError)
    return str(raised)


def test_wrappers_are_filled_in_place(tmp_path: Path) -> None:
    state = {"model": {"w": Quantized.random((6, 5)), "two": [TwoTensor(torch.ones(3), torch.randn(3))]}, "b": torch.randn(2)}
    into = {
        "model": {"w": state["model"]["w"].blank(), "two": [TwoTensor(torch.zeros(3), torch.zeros(3))]},
        "b": torch.zeros(2),
    }
    targets = into["model"]["w"], into["model"]["two"][0]
    save(state, tmp_path)
    load(into, tmp_path)
    assert into["model"]["w"] is targets[0]
    assert targets[0].same(state["model"]["w"])
    assert torch.equal(targets[1].b, state["model"]["two"][0].b)
    assert torch.equal(into["b"], state["b"])
    again = {"model": {"w": state["model"]["w"].blank(), "two": [TwoTensor(torch.zeros(3), torch.zeros(3))]}, "b": torch.zeros(2)}
    raystow.restore(tmp_path, again)
    assert again["model"]["w"].same(state["model"]["w"])


def test_other_classes_and_metadata_are_refused(tmp_path: Path) -> None:
    save({"w": Quantized.random((6, 5)), "plain": torch.ones(6, 5)}, tmp_path)
    other = Quantized.random((6, 5), block=5)
    before = other.codes.clone()
    assert 'state_dict["w"]: is ' in failure({"w": other}, tmp_path)
    assert torch.equal(other.codes, before)
    assert failure({"w": torch.zeros(6, 5)}, tmp_path).startswith("w: version 1 has a dict")
    assert "in the state but not saved: plain.__class__" in failure({"plain": Quantized.random((6, 5))}, tmp_path)
    assert "w" in failure({"w": torch.zeros(6, 5).as_subclass(Opaque)}, tmp_path)
    assert "tensors of class Opaque" in failure({"plain": torch.zeros(6, 5).as_subclass(Opaque)}, tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="tensors of class Opaque cannot be stored"):
        save({"w": torch.ones(3).as_subclass(Opaque)}, tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*.pack"))


def test_wrappers_in_values_of_dcp_are_refused(tmp_path: Path) -> None:
    state = {"t": (Quantized.random((6, 5)),)}
    save(state, tmp_path)
    assert 'state_dict["t"]: contains a tensor that consists of others' in failure({"t": (state["t"][0].blank(),)}, tmp_path)


def test_boxes_are_saved(tmp_path: Path) -> None:
    tensor = torch.randn(9, 4)
    boxes = Boxes([Box(tensor[:2], (9, 4), (0, 0)), Box(tensor[2:, 1:], (9, 4), (2, 1)), Box(tensor[2:, :1], (9, 4), (2, 0))])
    save({"w": boxes, "whole": Box(tensor, (9, 4), (0, 0))}, tmp_path)
    into: dict[str, Any] = {"w": torch.zeros(9, 4)}
    load(into, tmp_path)
    assert torch.equal(into["w"], tensor)
    target = Box(torch.zeros(3, 2), (9, 4), (4, 2))
    raystow.restore(tmp_path, {"w": torch.zeros(9, 4), "whole": target})
    assert torch.equal(target.local, tensor[4:7, 2:])


def test_boxes_with_a_gap_make_no_version(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException):
        save({"w": Boxes([Box(torch.ones(2), (9,), (0,)), Box(torch.ones(2), (9,), (7,))])}, tmp_path)
    assert raystow.latest(tmp_path) is None
