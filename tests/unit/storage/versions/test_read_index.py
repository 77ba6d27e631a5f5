"""``Version.read(name, index=...)`` indexes like numpy for any chunks of a tensor. Chunks that do not tile the tensor are
damage.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.builders import memory_repository, write
from helpers.scripted_store import script
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, StateError
from raystow.storage.format.manifest import Box
from raystow.storage.versions.version import Version

ARRAYS = {
    "cube": np.arange(7 * 5 * 6, dtype=np.int32).reshape(7, 5, 6),
    "row": np.arange(3000, dtype=np.float32) ** 2,
    "point": np.array(4.5),
    "none": np.empty((4, 0, 3), np.uint8),
}
CUTS: dict[str, list[Box]] = {
    "cube": [((0, 0, 0), (3, 5, 6)), ((3, 0, 0), (4, 2, 6)), ((3, 2, 0), (4, 3, 1)), ((3, 2, 1), (4, 3, 5))],
    "row": [((0,), (1,)), ((1,), (1999,)), ((2000,), (1000,))],
    "point": [((), ())],
    "none": [((0, 0, 0), (4, 0, 3))],
}


def committer() -> Committer:
    return Committer(memory_repository(), "me")


@pytest.fixture(scope="module")
def version() -> Version:
    return write(committer(), {name: (array, CUTS[name]) for name, array in ARRAYS.items()})


bounds = st.none() | st.integers(-9, 9) | st.sampled_from([-5000, 1500, 2000, 5000])
parts = st.integers(-8, 8) | st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4)) | st.just(...)
indices = st.none() | parts | st.lists(parts, max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(list(ARRAYS)), index=indices)
def test_an_index_selects_what_numpy_selects(version: Version, name: str, index: Any) -> None:
    array = ARRAYS[name]
    try:
        wanted = array if index is None else array[index]
    except IndexError:
        with pytest.raises(StateError, match=name):
            version.read(name, index=index)
        return
    found = version.read(name, index=index)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    "index", [slice(None, None, -1), slice(None, None, 0), slice("a", None), slice(0.5), 1.5, "x", True, [0, 1]]
)
def test_other_indices_are_refused(version: Version, index: Any) -> None:
    with pytest.raises(StateError, match="cube"):
        version.read("cube", index=index)


def test_only_overlapping_chunks_are_read(version: Version) -> None:
    ranges = []
    get_range = version.store.get_range
    script(version.store, get_range=lambda key, start, n: ranges.append((start, n)) or get_range(key, start, n))
    version.read("row", index=slice(5, 10))
    chunk = version.chunks["row"][1]
    assert ranges == [(chunk.start, chunk.coding.size)]


def test_an_unknown_name_raises_state_error(version: Version) -> None:
    with pytest.raises(StateError, match="nothing"):
        version.read("nothing")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes that tile it, made by repeated cuts. One of the boxes may be moved."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offset, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[axis]))
        for start, size in ((0, at), (at, extent[axis] - at)):
            if size:
                moved = (*offset[:axis], offset[axis] + start, *offset[axis + 1 :])
                boxes.append((moved, (*extent[:axis], size, *extent[axis + 1 :])))
    if draw(st.booleans()):
        i, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offset, extent = boxes[i]
        room = shape[axis] - extent[axis]
        boxes[i] = (*offset[:axis], draw(st.integers(0, room)), *offset[axis + 1 :]), extent
    return shape, draw(st.permutations(boxes))


@settings(max_examples=150, deadline=None)
@given(cut=cuts())
def test_boxes_that_do_not_tile_are_damage(cut: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = cut
    times = np.zeros(shape, int)
    for offset, extent in boxes:
        times[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] += 1
    array = np.arange(times.size, dtype=np.int16).reshape(shape)
    version = write(committer(), {"t": (array, boxes)})
    if (times == 1).all():
        assert np.array_equal(version.read("t"), array)
    else:
        with pytest.raises(Damaged):
            version.read("t")


@pytest.mark.parametrize("hole", [False, True])
def test_boxes_around_a_box_tile_the_tensor(hole: bool) -> None:
    """No plane separates these five boxes. If the middle box is moved onto another one, the sum of the volumes is still
    correct.
    """
    array = np.arange(9, dtype=np.int64).reshape(3, 3)
    boxes: list[Box] = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((0, 1) if hole else (1, 1), (1, 1)),
    ]
    version = write(committer(), {"t": (array, boxes)})
    if hole:
        with pytest.raises(Damaged, match="t"):
            version.read("t")
    else:
        assert np.array_equal(version.read("t"), array)


def test_many_boxes_are_checked_quickly() -> None:
    array = np.zeros((64, 64), np.uint8)
    boxes: list[Box] = [((i, j), (1, 1)) for i, j in itertools.product(range(64), range(64))]
    version = write(committer(), {"t": (array, boxes)})
    assert np.array_equal(version.read("t"), array)


def test_a_shape_not_covered_by_chunks_is_not_allocated() -> None:
    class Huge:
        """A fake array that is far larger than its one box."""

        ndim, shape, dtype = 2, (2**40, 2**20), np.dtype(np.float32)

        def __getitem__(self, index: Any) -> np.ndarray:
            return np.zeros((1, 4), np.float32)

    version = write(committer(), {"t": (Huge(), [((0, 0), (1, 4))])})  # type: ignore[dict-item]
    with pytest.raises(Damaged, match="'t'"):
        version.read("t")
