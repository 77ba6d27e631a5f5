"""Keeps a version from mixing the tensors of ``save`` with what the training writes to them before they are read.

``save`` copies small tensors of the host, such as the statistics of a batch norm, which change in the next forward pass. It
also copies memory of which torch counts no writes: arrays, inference tensors, and tensors in shared memory. If that is too large
for a copy, it is *exposed*: ``save`` returns when it has been read. Of each other tensor, also of small ones on a GPU, the check
notes torch's version counter, which operations in place increase when they end. Writes that do not count there (through
``.data``, by numpy, fused optimizers, collectives or kernels) are found by a sample of the elements of tensors in host memory, if
they change one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .shard_cache import TensorView
from .shards import bits, check_memory, resolved
from .tree import Elements

SMALL = 64 << 10
"""Bytes of a tensor in host memory that is copied by ``save``."""

_COPIED = 64 << 20  # bytes of small tensors that one save copies at most
UNCOUNTED = 256 << 20
"""Bytes of memory without a version counter that one save copies at most."""
_SAMPLE = 64  # elements


def copy_unguarded(views: Iterable[TensorView]) -> tuple[tuple[TensorView, ...], WriteCheck]:
    """Replace the elements of tensors in host memory that may change at once by a copy, which the training cannot change.

    Returns:
        All views, and the check of those that were not copied.

    Raises:
        StateError: The memory of a tensor of the host was freed.
    """
    small, uncounted, made, others = _COPIED, UNCOUNTED, list[TensorView](), list[TensorView]()
    for view in views:
        leaf, local, shard = view
        on_host, size = shard.device is None, local.nbytes
        if on_host and not isinstance(local, np.ndarray):
            check_memory(leaf, local, shard.reach)
        copied = on_host and size <= min(SMALL, small)
        if copied:
            small -= size
        elif on_host and size <= uncounted and not _counted(local):
            uncounted -= size
            copied = True
        if copied:
            view = TensorView(leaf, _copy(local), shard.in_own_memory())
        else:
            if not isinstance(local, np.ndarray):  # the tensor may get other memory meanwhile, as in a swap with averaged weights
                view = TensorView(leaf, local.detach(), shard)
            others.append(view)
        made.append(view)
    return tuple(made), WriteCheck(others)


class WriteCheck:
    """Notes the tensors of one save that were not copied, as they were when ``save`` was called.

    ``exposed``: whether torch does not count the writes to one of them, so that ``save`` must not return before it is read.
    """

    def __init__(self, views: Iterable[TensorView]) -> None:
        self._noted = [
            (view, _place_and_version(view.local), None if view.shard.device is not None else _sample(view.local))
            for view in views
            if view.local.nbytes
        ]
        self.exposed = not all(_counted(view.local) for view, _, _ in self._noted)

    def changed(self) -> str:
        """Return the name of a tensor that has changed since; "" if none has. On any thread, before the tensors may change."""
        for view, noted, sample in self._noted:
            if _place_and_version(view.local) != noted or (sample is not None and _sample(view.local) != sample):
                return view.leaf.name
        return ""


def _copy(local: Elements) -> Elements:
    if isinstance(local, np.ndarray):
        return np.array(local)
    if local.element_size() == 1:  # torch copies no integers of less than eight bits
        import torch

        return local.detach().view(torch.uint8).clone().view(local.dtype)
    return local.detach().clone()


def _version(local: Elements) -> int | None:
    """The number of operations in place on a tensor and those that share its memory; None if torch does not count them."""
    if isinstance(local, np.ndarray) or local.is_inference():
        return None
    return int(local._version)


def _place_and_version(local: Elements) -> tuple[int, int | None]:
    """The place of the memory, which differs after it was freed or resized, and ``_version``."""
    return (0 if isinstance(local, np.ndarray) else local.data_ptr()), _version(local)


def _counted(local: Elements) -> bool:
    """Whether the version counter shows all operations of torch on this memory. Other processes write to shared memory; each
    tensor of CUDA could be shared with them."""
    if isinstance(local, np.ndarray) or local.is_inference():
        return False
    return bool(local.is_cuda or not local.is_shared())


def _sample(local: Elements) -> bytes:
    words = bits(resolved(local))
    return bytes(words[_places(words.shape)].tobytes())


@functools.lru_cache(maxsize=1 << 12)
def _places(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Indices of elements at random, the same in each call."""
    size = int(np.prod(shape))
    return np.unravel_index(np.random.default_rng(size).integers(0, size, _SAMPLE), shape)
