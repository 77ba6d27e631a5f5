"""Boxes of tensors are stored in the shape of the tensors, and restored into other boxes or whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import raystow
from raystow import Box, Boxes
from raystow.storage.errors import SaveFailed, StateError

SHAPES = {"cube": (5, 4, 3), "matrix": (7, 3), "row": (50,), "one": (1,), "scalar": (), "long": (300, 90)}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def ranges(tensors: dict[str, torch.Tensor], cuts: Sequence[float]) -> list[dict[str, Any]]:
    """Return the boxes of each rank for flattened tensors that are cut at these fractions of their lengths."""
    ranks = []
    for low, high in itertools.pairwise((0, *cuts, 1)):
        rank = dict[str, Any]()
        for name, tensor in tensors.items():
            start, stop = (round(at * tensor.numel()) for at in (low, high))
            rank[name] = Boxes.of_range(tensor.flatten()[start:stop], tuple(tensor.shape), start)
        ranks.append(rank)
    return ranks


def blank(boxes: Boxes) -> Boxes:
    return Boxes(tuple(Box(torch.zeros_like(box.local), box.shape, box.offset) for box in boxes.boxes))


def test_ranges_restore_whole_tensors_and_other_ranges() -> None:
    tensors = whole()
    with LocalCluster("memory://ranges", nodes=2) as cluster:
        first = cluster.save_all(ranges(tensors, (0.3, 0.45)), step=1)
        for tensor in tensors.values():
            tensor.mul_(2)
        version = cluster.save_all(ranges(tensors, (0.3, 0.45)), step=2)
    assert version.tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(version.read(name), tensor)
        assert torch.equal(first.read(name) * 2, tensor)
    for part in ranges(tensors, (0.1, 0.5, 0.51)):
        into = {name: blank(boxes) for name, boxes in part.items()}
        raystow.restore(version, into)
        for name, boxes in into.items():
            assert all(torch.equal(a.local, b.local) for a, b in zip(boxes.boxes, part[name].boxes, strict=True)), name


def test_uneven_boxes_of_two_ranks_restore_anywhere() -> None:
    tensor, array = torch.randn(9, 4), np.arange(10)
    ranks = [
        {
            "w": Boxes((Box(tensor[:2], (9, 4), (0, 0)), Box(tensor[7:, 1:], (9, 4), (7, 1)))),
            "a": Box(array[:7], (10,), (0,)),
            "same": Box(tensor, (9, 4), (0, 0), ranks=(0, 1)),
        },
        {
            "w": Boxes([Box(tensor[2:7], (9, 4), (2, 0)), Box(tensor[7:, :1], (9, 4), (7, 0))]),
            "a": Box(array[7:], (10,), (7,)),
            "same": Box(tensor, (9, 4), (0, 0), ranks=(1, 0)),
        },
    ]
    with LocalCluster("memory://uneven", nodes=2) as cluster:
        version = cluster.save_all(ranks, step=1)
    assert version.raw == 2 * tensor.nbytes + array.nbytes  # an equal box is stored once
    assert torch.equal(version.read("w"), tensor)
    into: dict[str, Any] = {"w": torch.zeros(9, 4), "a": np.zeros(10, np.int64), "same": torch.zeros(9, 4)}
    raystow.restore(version, into)
    assert torch.equal(into["w"], tensor)
    assert torch.equal(into["same"], tensor)
    assert np.array_equal(into["a"], array)
    other = {"w": Box(torch.zeros(4, 2), (9, 4), (4, 1)), "a": Box(np.zeros(3, np.int64), (10,), (5,))}
    raystow.restore(version, other, strict=False)
    assert torch.equal(other["w"].local, tensor[4:8, 1:3])
    assert np.array_equal(other["a"].local, array[5:8])


def rows(*of_ranks: tuple[int, int]) -> list[dict[str, Any]]:
    tensor = torch.randn(10, 3)
    return [
        {"other": Box(tensor, (10, 3), (0, 0), ranks=range(len(of_ranks)))} | {"w": Box(tensor[a:b], (10, 3), (a, 0))}
        for a, b in of_ranks
    ]


@pytest.mark.parametrize(
    "of_ranks",
    [((0, 5), (6, 10)), ((0, 6), (5, 10)), ((0, 5), (4, 9)), ((0, 5), (5, 9)), ((0, 5), (5, 5))],
    ids=["gap", "overlap", "overlap and gap of one size", "end is missing", "one rank has nothing"],
)
def test_boxes_that_are_no_whole_tensor_make_no_version(of_ranks: tuple[tuple[int, int], ...]) -> None:
    with LocalCluster("memory://gap") as cluster, pytest.raises(SaveFailed, match="do not add up to the whole tensor 'w'"):
        cluster.save_all(rows(*of_ranks), step=1)


def test_boxes_without_the_first_element_make_no_version() -> None:
    with LocalCluster("memory://begin") as cluster, pytest.raises(SaveFailed, match="no rank stores the others"):
        cluster.save_all(rows((1, 5), (5, 10)), step=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(torch.ones(3, 2), (8,), (0,)), "local has 2 dimensions, shape 1, offset 1"),
        (lambda: Box(torch.ones(3), (8,), (6,)), r"\(3,\) at \(6,\) does not lie in a tensor of \(8,\)"),
        (lambda: Box(torch.ones(3), (8,), (-1,)), "does not lie in"),
        (lambda: Box(torch.ones(3), (8.5,), (0,)), "needs a tensor, and integers"),
        (lambda: Box([1, 2], (8,), (0,)), "needs a tensor, and integers"),
        (lambda: Box(torch.ones(3), (8,), (0,), ranks=(1, 1)), "are no ranks"),
        (lambda: Boxes([Box(torch.ones(3), (8,), (0,)), Box(torch.ones(3), (9,), (5,))]), "of different shapes"),
        (lambda: Boxes([Box(torch.ones(3), (8,), (0,)), Box(torch.ones(3), (8,), (2,))]), r"\(3,\) at \(0,\) and .* overlap"),
        (lambda: Boxes([torch.ones(3)]), "takes a list of raystow.Box"),
        (lambda: Boxes(Box(torch.ones(3), (8,), (0,))), "takes a list of raystow.Box"),
    ],
)
def test_boxes_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        make()


def test_boxes_of_other_shapes_and_dtypes_are_refused() -> None:
    with LocalCluster("memory://other") as cluster:
        version = cluster.save({"w": Box(torch.ones(4, 2), (4, 2), (0, 0))}, step=1)
        with pytest.raises(StateError, match=r'state\["w"\]: is a box of ranks \(1, 2\), not of rank 0'):
            cluster.save({"w": Box(torch.ones(4, 2), (4, 2), (0, 0), ranks=(1, 2))}, step=2)
    for box in (Box(torch.ones(2, 2), (5, 2), (0, 0)), Box(torch.ones(2, 2).half(), (4, 2), (0, 0))):
        with pytest.raises(StateError, match=r'into\["w"\]: is '):
            raystow.restore(version, {"w": box})


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that make up a tensor: one that is cut in two again and again."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offset, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[axis]))
        for low, size in ((0, at), (at, extent[axis] - at)):
            boxes.append(((*offset[:axis], offset[axis] + low, *offset[axis + 1 :]), (*extent[:axis], size, *extent[axis + 1 :])))
    return boxes


@settings(max_examples=12, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), world=st.integers(1, 3))
def test_any_partition_restores_into_any_other(data: st.DataObject, shape: tuple[int, ...], world: int) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape)

    def boxes(filled: bool) -> list[Boxes]:
        """Return the boxes of each rank."""
        of: list[list[Box]] = [[] for _ in range(world)]
        for offset, extent in data.draw(partitions(shape)):
            part = tensor[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]
            of[data.draw(st.integers(0, world - 1))].append(Box(part if filled else torch.full_like(part, -1), shape, offset))
        return list(map(Boxes, of))

    with LocalCluster("memory://partitions") as cluster:
        version = cluster.save_all([{"n": 1, "w": mine} for mine in boxes(True)], step=1)
    assert torch.equal(version.read("w"), tensor)
    for mine in boxes(False):
        raystow.restore(cluster.uri, {"n": 0, "w": mine}, version=version)
        for box in mine.boxes:
            assert torch.equal(box.local, tensor[tuple(slice(a, a + n) for a, n in zip(*box.box, strict=True))])
