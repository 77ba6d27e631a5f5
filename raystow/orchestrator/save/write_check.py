"""Finds tensors that the training changes between ``save`` and the end of their staging: their version would mix two steps.

``save`` copies small tensors of the host, such as the statistics of a batch norm, which change in the next forward pass. Of each
other tensor, also of small ones on a GPU, it notes torch's version counter, which every operation in place increases. Writes that
do not count there (through ``.data``, numpy, shared memory) are found by a sample of the elements of tensors in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .shard_cache import TensorView
from .shards import bits, check_memory
from .state_tree import Elements

SMALL = 64 << 10
"""Bytes of a tensor in host memory that is copied by ``save``."""

_COPIED = 64 << 20  # bytes that one save copies at most
_SAMPLE = 64  # elements


def copy_small(views: Iterable[TensorView]) -> tuple[tuple[TensorView, ...], WriteCheck]:
    """Replace the elements of small tensors in host memory by a copy, which the training cannot change.

    Returns:
        All views, and the check of those that were not copied.

    Raises:
        StateError: The memory of a tensor of the host was freed.
    """
    left, made, others = _COPIED, list[TensorView](), list[TensorView]()
    for view in views:
        leaf, local, shard = view
        if shard.device is None and not isinstance(local, np.ndarray):
            check_memory(leaf, local, shard.reach)
        if shard.device is None and (size := local.nbytes) <= min(SMALL, left):
            left -= size
            view = TensorView(leaf, _copy(local), shard.in_own_memory())
        else:
            others.append(view)
        made.append(view)
    return tuple(made), WriteCheck(others)


class WriteCheck:
    """Notes the tensors of one save that were not copied, as they were when ``save`` was called."""

    def __init__(self, views: Iterable[TensorView]) -> None:
        self._noted = [
            (view, _version(view.local), None if view.shard.device is not None else _sample(view.local))
            for view in views
            if view.local.nbytes
        ]

    def changed(self) -> str:
        """Return the name of a tensor that has changed since; "" if none has. On any thread, before the tensors may change."""
        for view, version, sample in self._noted:
            if _version(view.local) != version or (sample is not None and _sample(view.local) != sample):
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


def _sample(local: Elements) -> bytes:
    words = bits(local)
    return bytes(words[_places(words.shape)].tobytes())


@functools.lru_cache(maxsize=1 << 12)
def _places(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Indices of elements at random, the same in each call."""
    size = int(np.prod(shape))
    return np.unravel_index(np.random.default_rng(size).integers(0, size, _SAMPLE), shape)
