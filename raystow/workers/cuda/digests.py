"""The digests of many chunks in device memory as they are now, in a few launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import kernels, tables


def digests(sources: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The sums of all ``sources`` (see ``encoder.Source``) before ``storage.digest.finish``: int64 in pinned memory, to be looked
    at when the current stream is through."""
    sums = torch.zeros(len(sources), dtype=torch.int64, device=device)
    kinds = [(source.address is None, source.dtype.width) for source in sources]
    for (scattered, width), alike in itertools.groupby(sorted(range(len(sources)), key=kinds.__getitem__), kinds.__getitem__):
        some = list(alike)
        for part in ([i] for i in some) if scattered else (some,):  # one at a time, where copies are needed
            copies = [sources[i].gather() for i in part] if scattered else []
            rows = np.zeros((len(part), tables.COLUMNS), np.int64)
            rows[:, 0] = [copy.data_ptr() for copy in copies] or [sources[i].address for i in part]
            rows[:, 1] = [sources[i].nbytes // width for i in part]
            got = torch.zeros(len(part), dtype=torch.int64, device=device)
            largest = int(rows[:, 1].max()) * width
            kernels.digest(_upload(rows, device), largest, width=width, packed=tables.can_pack(rows, width), digests=got)
            sums[_upload(np.array(part), device)] = got
            del copies  # their memory is used again on this stream only
    return torch.empty(len(sources), dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)


def _upload(rows: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)
