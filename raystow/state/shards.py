"""This rank's part of each tensor: its box, the ranks that have the same box, and its elements."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..storage.coding import dtypes
from ..storage.errors import StateError
from ..storage.format import manifest
from ..storage.format.boxes import Box
from .box import Box as TensorBox
from .dtensor_layout import dtensor_shard
from .lossy.rules import Rule, RuleSelector
from .lossy.tensor_values import dtype_name, words_of
from .tree import Elements, Leaf, show
from .wrapper_tensors import unwrapped

if TYPE_CHECKING:
    import torch

_LEAST = 4096  # bytes; for a smaller derived tensor the manifest row costs as much as it saves
_ARRAYS = (np.ndarray, np.memmap)  # other classes may have more than elements, such as a mask

Likeness: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...], bool]
"""Equal for shards of one name that can be derived from the same shards."""


@dataclass(eq=False)
class Shard:
    """``holders``: the ranks that have the same box, ascending; empty for all ranks. ``local``: this rank's elements; None after
    ``release``. ``device``: their CUDA device; None for host memory. ``selector``: the rounding that the user specified;
    ``rule``: the rule that is used; ``findings``: its errors by the box of each chunk (see ``lossy.rounded_chunk``)."""

    leaf: Leaf
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    holders: tuple[int, ...]
    local: Elements
    device: int | None = None
    selector: RuleSelector | None = None
    rule: Rule | None = None
    findings: dict[Box, torch.Tensor] = field(default_factory=dict)

    def hold(self, leaf: Leaf, local: Elements) -> None:
        """Take the same tensor's elements of another save."""
        self.leaf, self.local = leaf, local
        self.__dict__.pop("bits", None)

    def without_elements(self) -> Shard:
        """A copy for later saves, with the properties that can be computed only with elements."""
        _ = self.identity, self.likeness, self.reach
        return self.with_elements(self.leaf._replace(value=None), None)

    def with_elements(self, leaf: Leaf, local: Elements) -> Shard:
        """A copy with the same properties and the tensor's elements of another save."""
        other = copy.copy(self)
        other.findings = {}
        other.hold(leaf, local)
        return other

    def in_own_memory(self) -> Shard:
        """The shard of a copy of its elements, which has no gaps between them."""
        if self.reach <= math.prod(self.extent):
            return self
        other = copy.copy(self)
        other.reach = 0
        return other

    def release(self) -> None:
        self.hold(self.leaf._replace(value=None), None)
        self.findings.clear()

    @functools.cached_property
    def bits(self) -> Elements:
        """The elements as opaque words: numpy in host memory, torch on a device. They share the memory of ``local``, unless that
        is ``pending``: then they are a copy. Made at first use, not on the training thread."""
        return bits(resolved(self.local))

    @functools.cached_property
    def format(self) -> dtypes.DType:
        return dtypes.dtype(self.dtype)

    @property
    def itemsize(self) -> int:
        return self.format.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * self.itemsize

    @property
    def first(self) -> int:
        """The rank that counts the tensor: of those with its first element the lowest, -1 for all other boxes and for the tensors
        of all ranks."""
        return self.holders[0] if self.holders and not any(self.offset) and 0 not in self.extent else -1

    @property
    def address(self) -> int:
        """Of the first element of a torch tensor."""
        local: torch.Tensor = self.local
        return int(local.data_ptr())

    @functools.cached_property
    def place(self) -> int | None:
        """On a device: the address; None if the tensor is not contiguous, or lazily conjugated."""
        local: torch.Tensor = self.local
        return self.address if local.is_contiguous() and not pending(local) else None

    @functools.cached_property
    def reach(self) -> int:
        """The span from the first to the end of the last element of a tensor, in elements; 0 without elements and for arrays."""
        if isinstance(self.local, np.ndarray) or not self.local.numel():
            return 0
        return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(self.local.shape, self.local.stride(), strict=True))

    @functools.cached_property
    def derivable(self) -> bool:
        """Whether it may be derived from another tensor, or another one from it: see ``derived_tensors``."""
        simple = self.kind == manifest.TENSOR and self.format.is_float and self.itemsize <= 8
        return simple and self.nbytes >= _LEAST and self.place is not None

    @functools.cached_property
    def likeness(self) -> Likeness:
        return self.leaf.name, self.dtype, self.extent, self.holders, self.derivable

    @functools.cached_property
    def identity(self) -> object:
        """Equal for shards of one tensor in the same memory."""
        where = self.device, self.device is not None and self.place
        return self.leaf.path, self.kind, self.dtype, self.shape, self.offset, self.extent, self.holders, *where


def shard_of(leaf: Leaf, *, rank: int = 0, what: str = "state") -> Shard:
    """The shard of a tensor leaf; ``rank`` alone has a box that names no ranks. ``StateError`` for a tensor that is not plain
    bytes in memory."""
    value = leaf.value
    if isinstance(value, TensorBox):
        shard, holders = shard_of(leaf._replace(value=value.local), what=what), value.ranks or (rank,)
        if shard.holders:
            raise _unsuitable(leaf, what, "boxes of a DTensor", "pass its local tensor")
        if rank not in holders and what == "state":
            raise StateError(f"is a box of ranks {holders}, not of rank {rank}", subject=show(leaf.path, what))
        return dataclasses.replace(shard, leaf=leaf, shape=value.shape, offset=value.offset, holders=tuple(sorted(holders)))
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ndarray) and type(value) not in _ARRAYS:
            raise _unsuitable(leaf, what, f"arrays of class {type(value).__name__}", "save its parts")
        kind = manifest.ARRAY if isinstance(value, np.ndarray) else manifest.SCALAR
        array = np.asarray(value)
        dtype = dtypes.of_numpy(array.dtype)
        if dtype is None:
            raise _unsuitable(
                leaf, what, f"numpy dtype {array.dtype}", "convert it to a numeric or boolean dtype of native byte order"
            )
        return Shard(leaf, kind, dtype, array.shape, (0,) * array.ndim, array.shape, (), array)
    return _torch_shard(leaf, what)


def _torch_shard(leaf: Leaf, what: str) -> Shard:
    import torch

    tensor: torch.Tensor = leaf.value
    kind = type(tensor)
    try:
        shape = tuple(tensor.shape)
    except RuntimeError as error:  # nested, or a lazy parameter before its first use
        sort = "nested" if tensor.is_nested else "uninitialized"
        raise _unsuitable(leaf, what, f"{sort} tensors", "save dense tensors") from error
    offset, extent, local = (0,) * len(shape), shape, tensor
    holders: tuple[int, ...] = ()
    if kind is torch.Tensor or kind is torch.nn.Parameter:  # as most are
        pass
    elif (distributed := sys.modules.get("torch.distributed.tensor")) is not None and isinstance(tensor, distributed.DTensor):
        (offset, extent), holders = dtensor_shard(tensor, show(leaf.path, what))
        local = unwrapped(tensor._local_tensor)
        kind = type(local)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or torch._is_functional_tensor(local):
        sort = "nested tensors" if local.is_nested else f"tensors of class {kind.__name__}"
        raise _unsuitable(leaf, what, sort, "save its parts")
    if local.layout != torch.strided or local.is_quantized or local.is_meta:
        flags = {"quantized": local.is_quantized, "meta": local.is_meta}
        sort = next((name for name, is_set in flags.items() if is_set), str(local.layout))
        raise _unsuitable(leaf, what, f"{sort} tensors", "save dense tensors")
    dtype = dtype_name(tensor.dtype)
    if dtype not in dtypes.DTYPES:
        raise StateError(f"dtype {dtype} cannot be stored", subject=show(leaf.path, what))
    device = local.device.index if local.is_cuda else None
    shard = Shard(leaf, manifest.TENSOR, dtype, shape, offset, extent, holders, local, device)
    check_memory(leaf, local, shard.reach, what=what)
    return shard


def check_memory(leaf: Leaf, local: Elements, reach: int, *, what: str = "state") -> None:
    """``StateError`` if the memory of a tensor ends before its elements do. ``reach``: see ``Shard``."""
    if isinstance(local, np.ndarray) or not reach:
        return
    if (local.storage_offset() + reach) * local.element_size() > local.untyped_storage().nbytes():
        raise _unsuitable(leaf, what, "tensors whose memory was freed", "gather them first, as their framework does")


def _unsuitable(leaf: Leaf, what: str, sort: str, remedy: str) -> StateError:
    return StateError(f"{sort} cannot be stored", subject=show(leaf.path, what), remedy=remedy)


def overlaps(local: Elements) -> bool:
    """Whether elements of a tensor or array may share memory, as in one that is expanded."""
    if 0 in local.shape:
        return False
    strides, least = (local.strides, local.itemsize) if isinstance(local, np.ndarray) else (local.stride(), 1)
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, local.shape, strict=True) if size > 1):
        if stride < least:
            return True
        least += stride * (size - 1)  # what the dimensions so far reach over
    return False


def pending(local: Elements) -> bool:
    """Whether the conjugation or negation of a torch tensor is pending: other bits are in its memory than its values have."""
    return not isinstance(local, np.ndarray) and bool(local.is_conj() or local.is_neg())


def resolved(local: Elements) -> Elements:
    """The same values with their own bits in memory: a copy if they are ``pending``."""
    return local if isinstance(local, np.ndarray) or not pending(local) else local.detach().resolve_conj().resolve_neg()


def bits(local: Elements) -> Elements:
    """The elements of an array or local torch tensor as opaque words that share its memory: numpy on the CPU, torch elsewhere.

    ``ValueError`` for a tensor that is ``pending``.
    """
    if isinstance(local, np.ndarray):
        return local.view(f"V{local.itemsize}")
    found, size = words(local), local.element_size()
    if found.device.type != "cpu":
        return found
    return found.numpy().view("V16")[..., 0] if size == 16 else found.numpy().view(f"V{size}")


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a local torch tensor as integers that share its memory; of complex128, which is wider than any, as pairs.

    ``ValueError`` for a tensor that is ``pending``.
    """
    import torch

    if pending(tensor):
        raise ValueError("the memory of a conjugated or negated view does not have the bits of its values")
    local, size = tensor.detach(), tensor.element_size()
    return torch.view_as_real(local).view(torch.int64) if size == 16 else local.view(words_of(size))
