"""The numbers of a tensor in place, for rules that measure them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...storage.format.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as TorchDtype

_RUNS, _RUN = 64, 256


@dataclass(frozen=True)
class Numbers:
    """One rank's part of the tensor ``name``. ``words``: its elements as words of their width, of any strides: numpy in
    host memory, torch on a device. ``boxes``: the chunks that are rounded together. ``first``: the number of the first column
    along the last dimension of the whole tensor."""

    name: str
    dtype: str
    words: npt.NDArray[np.generic] | Tensor
    boxes: Sequence[Box]
    first: int = 0

    def chunks(self) -> Iterator[tuple[Tensor, int]]:
        """Copies of the chunks as torch words [rows, n], each with the number of its first column."""
        for offset, extent in self.boxes:
            part = self.words[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]
            yield _torch(part).reshape(-1, extent[-1]), self.first + offset[-1]

    def sample(self) -> Tensor:
        """Up to 64 evenly spread runs of up to 256 consecutive numbers, the same at each call: torch words [runs, n] in host
        memory."""
        count = math.prod(self.words.shape)
        run = max(1, min(_RUN, count))
        starts = np.linspace(0, count - run, min(_RUNS, count // run)).astype(np.int64)
        at = np.unravel_index(starts[:, None] + np.arange(run), self.words.shape)
        if isinstance(self.words, np.ndarray):
            return _torch(self.words[at])
        import torch

        return self.words[tuple(torch.from_numpy(index).to(self.words.device) for index in at)].cpu()


def _torch(words: npt.NDArray[np.generic] | Tensor) -> Tensor:
    """A contiguous copy."""
    import torch

    if isinstance(words, np.ndarray):
        words = torch.from_numpy(np.array(words, order="C").view(f"i{words.itemsize}"))
        return words.view(words_of(words.element_size()))
    return words.clone(memory_format=torch.contiguous_format)


@functools.cache
def dtype_name(dtype: TorchDtype) -> str:
    """The format's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def words_of(itemsize: int) -> TorchDtype:
    """The torch dtype of integers of ``itemsize`` bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
