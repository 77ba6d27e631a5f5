"""What a process that has a GPU can code on it."""

from __future__ import annotations

import logging
import sys

from ..storage.errors import StateError

logger = logging.getLogger(__name__)


def usable_codec(codec: str) -> str:
    """``codec`` as it was asked for. Where a GPU is there but not what coding on it takes, ``auto`` becomes ``cpu`` with a
    warning, and one of nvCOMP's coders is a ``StateError``. Without a GPU nothing is loaded and nothing said: no tensor asks."""
    torch = sys.modules.get("torch")
    if codec == "cpu" or torch is None or not torch.cuda.is_available():
        return codec
    from ..workers import cuda

    problem = cuda.missing()
    if problem is None:
        return codec
    if codec != "auto":
        raise StateError(f"codec {codec!r} cannot be had here: {problem}", remedy="install what is missing, or pass codec='cpu'")
    logger.warning("tensors on the GPU will be compressed by the CPU, at a hundredth of the speed: %s", problem)
    return "cpu"
