"""Comparison of the tensors of two versions, for any chunks and contents, in slabs of bounded size."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.builders import whole, write

from raystow.cli.version_comparison import SLAB, Change, Deviation, Difference, compare, deviate, differences, work
from raystow.storage.coding import dtypes
from raystow.storage.versions.version import Version

ROWS = [((0, 0), (5, 6)), ((5, 0), (3, 6))]
COLUMNS = [((0, 0), (8, 1)), ((0, 1), (8, 3)), ((0, 4), (8, 2))]


def deep(before: Version, after: Version, slab: int = SLAB) -> tuple[dict[str, Difference], list[int]]:
    """Return the differences found from the bytes, and the bytes of each slab."""
    found, slabs = differences(before, after), list[int]()
    compared = {one.name: one for one in compare(before, after, found, slabs.append, slab=slab)}
    assert sum(slabs) == work(found)
    return compared, slabs


@pytest.mark.parametrize("slab", [1, 50, 1 << 20])
def test_different_layouts_are_compared_in_slabs_of_any_size(committer, slab):
    old = np.arange(48, dtype=np.float32).reshape(8, 6)
    new = old.copy()
    new[[0, 6, 7], [5, 1, 0]] += [1, 0.5, -4]
    nothing = np.empty((0, 6), np.float32)
    before = write(committer, {"w": (old, ROWS), "same": (old, ROWS), "moved": (old, ROWS), "none": whole(nothing)})
    after = write(committer, {"w": (new, COLUMNS), "same": (old, ROWS), "moved": (old, COLUMNS), "none": whole(nothing)})
    changes = {one.name: one.what for one in differences(before, after)}
    assert changes == {"w": Change.LAYOUT, "same": Change.SAME, "moved": Change.LAYOUT, "none": Change.SAME}
    compared, slabs = deep(before, after, slab)
    w = compared["w"]
    assert (w.what, w.deviation.elements, w.changed, w.deviation.largest) == (Change.CHANGED, 3, 12, 4.0)
    assert compared["moved"].what is Change.SAME
    assert max(slabs) <= max(slab, 4)  # a slab has at least one element


def test_only_changed_chunks_are_compared(committer):
    old = np.arange(48, dtype=np.int64).reshape(8, 6)
    new = old.copy()
    new[7, 0] = -1
    before, after = write(committer, {"w": (old, ROWS)}), write(committer, {"w": (new, ROWS)})
    found = differences(before, after)
    assert (found[0].suspect, found[0].changed, work(found)) == (1, 3 * 6 * 8, 3 * 6 * 8)
    compared, slabs = deep(before, after)
    assert (compared["w"].deviation.elements, compared["w"].changed, compared["w"].deviation.largest, slabs) == (
        1,
        8,
        None,
        [3 * 6 * 8],
    )


def test_small_tensors_of_odd_sizes_share_one_slab(committer):
    old = {"a": np.array([1, 2, 3], np.uint8), "b": np.arange(5.0), "c": np.array(1.5, np.float16)}
    new = {"a": np.array([1, 2, 4], np.uint8), "b": np.arange(5.0) + 1, "c": np.array(2.0, np.float16)}
    before, after = (write(committer, {name: whole(array) for name, array in of.items()}) for of in (old, new))
    compared, slabs = deep(before, after)
    assert {name: one.deviation for name, one in compared.items()} == {
        "a": Deviation(1),
        "b": Deviation(5, 1.0),
        "c": Deviation(1, 0.5),
    }
    assert len(slabs) == 1


@pytest.mark.parametrize(
    ("dtype", "old", "new", "expected"),
    [
        ("float32", [1.0, 2.0, float("nan")], [1.0, -3.0, float("nan")], Deviation(1, 5.0)),
        ("float64", [0.0, 1e308], [-0.0, -1e308], Deviation(2, 0.0, 1)),
        ("bfloat16", [1.0, float("inf")], [1.5, 0.0], Deviation(2, 0.5, 1)),
        ("float16", [1.0], [1.0], Deviation()),
        ("float8_e4m3fn", [1.0, 2.0], [1.0, 4.0], Deviation(1, 2.0)),
        ("complex64", [1 + 2j, 3j], [1 + 5j, 3j], Deviation(1, 3.0)),
        ("complex128", [1 + 2j, 3j], [2 + 2j, 3.5j], Deviation(2, 1.0)),
        ("int64", [1, 2, 3], [1, 5, 4], Deviation(2)),
        ("bool", [True, False], [False, False], Deviation(1)),
    ],
)
def test_deviations_are_computed_for_each_dtype(dtype, old, new, expected):
    kind = dtypes.to_numpy(dtype)
    arrays = [np.array(numbers, kind).view(np.uint8) for numbers in (old, new)]
    assert deviate(*arrays, dtypes.dtype(dtype)) == expected


def test_deviations_add_up_over_blocks():
    old, new = np.zeros(10, np.float32), np.zeros(10, np.float32)
    new[[1, 6, 9]] = [0.5, np.inf, -3]
    assert deviate(old.view(np.uint8), new.view(np.uint8), dtypes.dtype("float32"), block=4) == Deviation(3, 3.0, 1)
