"""Decides what GPUs code of a rank's state."""

from __future__ import annotations

import functools
import logging
import sys

from ...state.assignment import GpuCoding
from ...storage.coding.chunk import ANS
from .options import Compression

logger = logging.getLogger(__name__)

FREE = 3 << 30
"""Bytes of device memory that must be free, so that a GPU codes tensors in host memory, too."""


class GpuCodingChoice:
    """``codec``: the one that is used for tensors on a GPU."""

    def __init__(self, compression: Compression, codec: str) -> None:
        self._tensors = codec != "cpu"
        readable = codec != ANS  # by a process without a GPU, too
        self._wanted = self._tensors and readable and compression.host == "auto" and compression.process == "training"

    def coding(self) -> GpuCoding:
        """Return what GPUs code. On the training thread, whose current device codes tensors in host memory."""
        torch = sys.modules.get("torch")
        if not self._wanted or torch is None or not torch.cuda.is_initialized():
            return GpuCoding(self._tensors)
        return GpuCoding(self._tensors, self._host)

    @functools.cached_property
    def _host(self) -> int | None:
        """The device that codes tensors in host memory, if there is enough memory on it at the first save."""
        import torch

        device = torch.cuda.current_device()
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] + unused >= FREE:
            return int(device)
        logger.info("the CPU codes tensors in host memory: less than %d GiB are free on cuda:%d", FREE >> 30, device)
        return None
