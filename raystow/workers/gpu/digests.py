"""Computes the digests of many chunks in device memory, in a few launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...storage.coding.digest import SecretKeys
from ...storage.runtime.batches import batches
from . import kernel_args
from .encode_request import Source
from .kernels import word_kernels
from .uploads import Uploads

_COPIED = 64 << 20
"""Bytes of chunks that are copied in device memory at a time."""


class _Batch(NamedTuple):
    """The chunks in ``table``, read by one launch. ``numbers``: their numbers among the sources."""

    table: torch.Tensor
    largest: int
    width: int
    packed: bool
    numbers: torch.Tensor


class Digests:
    """Computes the digests of ``sources`` (see ``Source``) on one device; with ``keys`` both numbers of ``digest_pair``.

    The tables of the kernels are made once.
    """

    def __init__(
        self, sources: Sequence[Any], device: torch.device, *, keys: SecretKeys | None = None, uploads: Uploads | None = None
    ) -> None:
        self._uploads = uploads or Uploads(device)
        self._count, self._device, self._keys, self._rows = len(sources), device, keys, 1 if keys is None else 3
        placed = [i for i, source in enumerate(sources) if source.address is not None]
        self._batches = [
            self._batch([(i, sources[i].address, sources[i].nbytes) for i in alike], width)
            for width, alike in itertools.groupby(
                sorted(placed, key=lambda i: sources[i].dtype.width), lambda i: sources[i].dtype.width
            )
        ]
        scattered = [(i, source) for i, source in enumerate(sources) if source.address is None]
        self._scattered = [
            some
            for _, alike in itertools.groupby(sorted(scattered, key=_width), _width)
            for some in batches(list(alike), lambda one: int(one[1].nbytes), _COPIED)
        ]

    def take(self) -> torch.Tensor:
        """Take them on the current stream.

        Returns:
            All sums before ``storage.coding.digest.finish``: int64 [sources] in pinned memory; with keys [3, sources], the second
            number of each pair in two halves. They are there when the current stream has come so far.
        """
        sums = self.on_device()
        host_sums = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)
        return host_sums[0] if self._keys is None else host_sums

    def on_device(self) -> torch.Tensor:
        """Take them on the current stream; return all sums in device memory: int64 [1, sources], with keys [3, sources]."""
        sums = torch.zeros((self._rows, self._count), dtype=torch.int64, device=self._device)
        for batch in self._batches:
            self._add(batch, sums)
        for some in self._scattered:  # few at a time: their copies' memory is used again on this stream only
            copies = self._uploads.gathered([source for _, source in some])
            self.add_copies([i for i, _ in some], copies, some[0][1].dtype.width, sums)
            del copies
        return sums

    def add_copies(self, numbers: Sequence[int], copies: Sequence[torch.Tensor], width: int, sums: torch.Tensor) -> None:
        """Take those of copies of chunks on the current stream, into ``sums`` as ``on_device`` returns them, at ``numbers``.
        ``width``: bytes of their words."""
        chunks = [(i, copy.data_ptr(), copy.nbytes) for i, copy in zip(numbers, copies, strict=True)]
        self._add(self._batch(chunks, width), sums)

    def _batch(self, chunks: Sequence[tuple[int, int, int]], width: int) -> _Batch:
        numbers, addresses, sizes = zip(*chunks, strict=True)
        rows = np.zeros((len(numbers), kernel_args.COLUMNS), np.int64)
        rows[:, 0], rows[:, 1] = addresses, np.array(sizes) // width
        packed = kernel_args.can_pack(rows, width)
        table, places = (kernel_args.upload(some, self._device) for some in (rows, np.array(numbers)))
        return _Batch(table, max(sizes), width, packed, places)

    def _add(self, batch: _Batch, sums: torch.Tensor) -> None:
        got = torch.zeros((self._rows, len(batch.numbers)), dtype=torch.int64, device=self._device)
        word_kernels.digest(batch.table, batch.largest, width=batch.width, packed=batch.packed, digests=got, keys=self._keys)
        sums[:, batch.numbers] = got


def _width(numbered: tuple[int, Source]) -> int:
    return numbered[1].dtype.width
