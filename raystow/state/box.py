"""Parts of a tensor as leaves of a state: ``Box`` and ``Boxes``. They are stored in the tensor's own shape."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.errors import StateError
from ..storage.format import boxes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class _Checkpointable:
    """How ``torch.distributed.checkpoint`` asks for the boxes of a leaf when it saves; it loads into tensors only."""

    def _all(self) -> Sequence[Box]:
        raise NotImplementedError

    def __create_write_items__(self, name: str, leaf: object) -> list[WriteItem]:
        import torch
        from torch.distributed.checkpoint import metadata, planner

        items = []
        for box, chunk in zip(self._all(), self.__create_chunk_list__(), strict=True):
            properties = metadata.TensorProperties.create_from_tensor(box._tensor())
            data = planner.TensorWriteData(chunk, properties, torch.Size(box.shape))
            index = metadata.MetadataIndex(name, chunk.offsets)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        import torch
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent)) for box in self._all()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        found = [box for box in self._all() if box.offset == tuple(index.offset)]
        return max(found, key=lambda box: math.prod(box.extent))._tensor()  # others of this offset are empty


@dataclass(frozen=True, eq=False)
class Box(_Checkpointable):
    """A box of a tensor: a leaf of a state, for parts that no DTensor describes.

    The boxes of all ranks must contain each element of the tensor once; a save with a gap or an overlap fails. Restoring fills
    ``local`` in place, from any boxes; ``dcp.load`` fills no boxes. A rank that has no elements passes an empty tensor.

    Args:
        local: The elements: a tensor or array of as many dimensions as ``shape``.
        shape: The shape of the whole tensor.
        offset: The place of the first element of ``local`` in the whole tensor.
        ranks: The ranks that have an equal box, this one included; it is stored once. Empty: only this rank.

    Raises:
        StateError: The box does not lie in ``shape``.

    Example:
        >>> state = {"w": raystow.Box(rows, shape=(1000, 64), offset=(start, 0))}
    """

    local: torch.Tensor | npt.NDArray[np.generic]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        try:
            for name in ("shape", "offset", "ranks"):
                object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
            extent = self.extent
        except (TypeError, AttributeError, RuntimeError) as error:
            what = f"needs a tensor, and integers for shape, offset and ranks: {error}"
            raise StateError(what, subject="raystow.Box", remedy="raystow.Box(tensor, shape=(8, 4), offset=(2, 0))") from error
        if not len(extent) == len(self.shape) == len(self.offset):
            what = f"local has {len(extent)} dimensions, shape {len(self.shape)}, offset {len(self.offset)}"
            raise StateError(what, subject="raystow.Box", remedy="pass as many numbers for each")
        if any(low < 0 or low + size > end for low, size, end in zip(self.offset, extent, self.shape, strict=True)):
            what = f"{extent} at {self.offset} does not lie in a tensor of {self.shape}"
            raise StateError(what, subject="raystow.Box", remedy="pass the shape of the whole tensor, and where this part begins")
        if len({*self.ranks}) < len(self.ranks) or min(self.ranks, default=0) < 0:
            raise StateError(f"ranks {self.ranks} are no ranks", subject="raystow.Box", remedy="name each rank once")

    def _all(self) -> Sequence[Box]:
        return (self,)

    def _tensor(self) -> torch.Tensor:
        import torch

        return torch.as_tensor(self.local)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(self.local.shape)

    @property
    def box(self) -> boxes.Box:
        """Offset and extent."""
        return self.offset, self.extent


@dataclass(frozen=True, eq=False)
class Boxes(_Checkpointable):
    """Several boxes of one tensor: a leaf of a state, where a rank has more than one.

    Args:
        boxes: The boxes. None of them overlap.

    Raises:
        StateError: The boxes overlap, or are of different tensors.

    Example:
        >>> state = {"w": raystow.Boxes([raystow.Box(a, (8, 4), (0, 0)), raystow.Box(b, (8, 4), (6, 0))])}
    """

    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.boxes, list | tuple) or not all(isinstance(box, Box) for box in self.boxes):
            raise StateError("takes a list of raystow.Box", subject="raystow.Boxes")
        object.__setattr__(self, "boxes", tuple(self.boxes))
        if len({box.shape for box in self.boxes}) > 1:
            shapes = ", ".join(sorted({str(box.shape) for box in self.boxes}))
            raise StateError(f"boxes of tensors of different shapes: {shapes}", subject="raystow.Boxes")
        if twice := _overlap(self.boxes):
            what = "boxes {} and {} overlap".format(*(f"{box.extent} at {box.offset}" for box in twice))
            raise StateError(what, subject="raystow.Boxes", remedy="pass each element once")

    def _all(self) -> Sequence[Box]:
        return self.boxes

    @staticmethod
    def of_range(elements: torch.Tensor, shape: Sequence[int], start: int) -> Boxes:
        """The elements from number ``start`` on, in row-major order, of a tensor of ``shape``, as ZeRO partitions tensors.
        ``elements``: a contiguous tensor of one dimension; if empty, this rank has none."""
        shape, size, at, found = tuple(shape), elements.numel(), 0, list[Box]()
        if not size and shape:
            return Boxes((Box(elements.view((0, *shape[1:])), shape, (0,) * len(shape)),))
        for offset, extent in boxes.boxes_of_range(start, start + size, shape):
            end = at + math.prod(extent)
            found.append(Box(elements[at:end].view(extent), shape, offset))
            at = end
        return Boxes(tuple(found))


def _overlap(found: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have an element in common. Sorted by rows, only neighbours are compared."""
    rows = sorted((box for box in found if 0 not in box.extent), key=lambda box: box.offset)
    for i, box in enumerate(rows):
        for other in rows[i + 1 :]:
            if other.offset and other.offset[0] >= box.offset[0] + box.extent[0]:
                break
            if boxes.overlap(box.box, other.box) is not None:
                return box, other
    return None
