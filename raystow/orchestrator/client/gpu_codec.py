"""Checks that the codec for tensors on a GPU is available in this process."""

from __future__ import annotations

import logging
import sys

from ...storage.errors import StateError

logger = logging.getLogger(__name__)


def usable_codec(codec: str) -> str:
    """``codec`` if it is available. If it is not, "auto" becomes "cpu" with a warning, and any other is a ``StateError``.

    Nothing is loaded without a GPU: no tensor needs a codec of GPUs then.
    """
    torch = sys.modules.get("torch")
    if codec == "cpu" or torch is None or not torch.cuda.is_available():
        return codec
    from ...workers import gpu

    problem = gpu.missing()
    if problem is None:
        return codec
    if codec != "auto":
        raise StateError(
            f"codec {codec!r} is not available: {problem}", remedy='install what is missing, or pass Compression("cpu")'
        )
    logger.warning("the CPU compresses tensors of the GPU, at a hundredth of the speed: %s", problem)
    return "cpu"
