"""The overlap of two boxes equals the one that torch.distributed.checkpoint computes; see docs/design/010-overlap.md."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from raystow.storage.format.boxes import Box, bounds, boxes_of_range, overlap, tile, within

boxes = st.integers(0, 4).flatmap(
    lambda n: st.lists(
        st.tuples(*(st.lists(st.integers(low, 9), min_size=n, max_size=n).map(tuple) for low in (0, 1))), min_size=2
    )
)


def as_torch(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


@settings(max_examples=500, deadline=None)
@given(boxes=boxes)
def test_overlaps_equal_the_read_plan_of_torch(boxes: list[Box]) -> None:
    mine, *saved = boxes
    size = torch.Size([20] * len(mine[0]))
    metadata = TensorStorageMetadata(TensorProperties(), size, [as_torch(box) for box in saved])
    wanted = sorted(create_read_items_for_chunk_list("t", metadata, [as_torch(mine)]), key=lambda item: item.storage_index.index)
    found = [overlap(mine, box) for box in saved]
    assert [(item.storage_index.index, tuple(item.lengths)) for item in wanted] == [(i, p[1]) for i, p in enumerate(found) if p]
    for item in wanted:
        box, part = saved[item.storage_index.index], found[item.storage_index.index]
        for offsets, outer in ((item.storage_offsets, box), (item.dest_offsets, mine)):
            assert within(part, outer) == tuple(slice(a, a + n) for a, n in zip(offsets, item.lengths, strict=True))


@settings(max_examples=300, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), ranks=st.integers(1, 12), data=st.data())
def test_shards_tile_a_tensor_only_if_each_occurs_once(shape: tuple[int, ...], ranks: int, data: st.DataObject) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    split = Shard(data.draw(st.integers(0, len(shape) - 1)))
    placed = [_compute_local_shape_and_global_offset(shape, (ranks,), [at], [split]) for at in range(ranks)]
    parts = [(offset, extent) for extent, offset in placed if math.prod(extent)]
    whole = ((0,) * len(shape), shape)
    assert tile(parts, whole)
    odd = data.draw(st.sampled_from(parts))
    assert not tile([part for part in parts if part != odd], whole)
    assert not tile([*parts, odd], whole)


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), ends=st.tuples(st.integers(0, 625), st.integers(0, 625)))
def test_a_range_of_elements_is_covered_by_few_boxes(shape: tuple[int, ...], ends: tuple[int, int]) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    start, stop = (min(end, elements.size) for end in sorted(ends))
    found = boxes_of_range(start, stop, shape)
    whole = (0,) * len(shape), shape
    assert [i for box in found for i in elements[within(box, whole)].flat] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    if found:
        inside = elements[within(bounds(found), whole)]
        assert {start, stop - 1} <= set(inside.flat)
        assert all(overlap(box, bounds(found)) == box for box in found)
