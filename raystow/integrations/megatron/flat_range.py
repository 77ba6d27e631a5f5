"""``FlatRange``: what one rank has of a parameter's optimizer state, as ``DistributedOptimizer`` partitions it.

The optimizer concatenates parameters and gives each data-parallel rank an equal range, so a rank has a range of the elements of a
parameter, in row-major order. A parameter may be stored as several tensors, such as the two halves of a gated layer: those are
views of it, by which the range is found in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedBase, ShardedTensor, ShardedTensorFactory

from ...storage.errors import StateError
from ...storage.format.boxes import Box


@dataclass
class FlatRange(ShardedBase):
    """Elements of a parameter's optimizer state, from number ``start`` on.

    ``key``: of the state, such as ``optimizer.state.exp_avg.decoder.final_layernorm.weight``. ``data``: the elements, a tensor of
    one dimension. ``parameter``: how Megatron stores the parameter, with its weights.
    """

    key: str
    data: torch.Tensor | None
    replica_id: ReplicaId
    parameter: ShardedTensor | ShardedTensorFactory
    start: int

    def validate_metadata_integrity(self) -> None:
        """Nothing can be wrong: the optimizer has made the range."""

    def without_data(self) -> FlatRange:
        return replace(self, data=None)

    def parts(self) -> Iterator[tuple[ShardedTensor, Box, torch.Tensor]]:
        """The stored tensors that have elements of the range: where in this rank's part of each, and the elements.

        ``StateError`` if a tensor is not a view of the parameter.
        """
        assert self.data is not None
        weights, flat, stop = self.parameter.data, self.data.detach(), self.start + self.data.numel()
        if not weights.is_contiguous() or not flat.is_contiguous():
            raise StateError("the parameter is not contiguous", subject=self.key)
        for tensor in self._stored():
            view = tensor.data
            if view.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
                what = "the tensor that Megatron stores is no view of the parameter"
                raise StateError(what, subject=self.key, remedy="let its ShardedTensorFactory build views")
            size, stride = tuple(view.shape), view.stride()
            first = view.storage_offset() - weights.storage_offset()
            for offset, extent in _boxes(size, stride, first, self.start, stop, self.key):
                at = first + sum(low * step for low, step in zip(offset, stride, strict=True)) - self.start
                yield tensor, (offset, extent), flat.as_strided(extent, stride, flat.storage_offset() + at)

    def _stored(self) -> list[ShardedTensor]:
        """The tensors that Megatron stores of the parameter, under the key of the state."""
        if isinstance(self.parameter, ShardedTensor):
            return [replace(self.parameter, key=self.key, replica_id=self.replica_id)]
        built = replace(self.parameter, key=self.key, replica_id=self.replica_id).build()
        found = list(built.values() if isinstance(built, dict) else built)
        if not all(isinstance(tensor, ShardedTensor) for tensor in found):
            raise StateError("the parameter is stored in nested containers, which is not supported", subject=self.key)
        return found


def _boxes(size: tuple[int, ...], stride: tuple[int, ...], first: int, start: int, stop: int, what: str) -> Iterator[Box]:
    """The boxes of a view with those of its elements that are the elements ``start`` to ``stop`` of the viewed tensor. ``first``:
    the number of the view's first element."""
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 in size or first >= stop or first + reach <= start:
        return
    if start <= first and first + reach <= stop:
        yield (0,) * len(size), size
        return
    rows, inner = size[0], 1 + sum((n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True))
    step = stride[0] if rows > 1 else inner
    if step < inner:
        raise StateError("its stored tensor is a transposed view of the parameter", subject=what)
    low = min(rows, max(0, -((first - start) // step)))  # the first row that begins in the range
    high = max(low, min(rows, (stop - inner - first) // step + 1))  # after the last that ends in it
    if low < high:
        yield (low,) + (0,) * (len(size) - 1), (high - low, *size[1:])
    for row in low - 1, high:
        if 0 <= row < rows:
            for offset, extent in _boxes(size[1:], stride[1:], first + row * step, start, stop, what):
                yield (row, *offset), (1, *extent)
