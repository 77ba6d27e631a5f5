"""Encoding and decoding on NVIDIA GPUs. Only this package uses CUDA and nvCOMP."""

from __future__ import annotations

from ...storage.errors import Unsupported


def missing() -> str | None:
    """Return why this process cannot encode on a GPU (torch or nvCOMP is missing or unsuitable); None if it can."""
    try:
        from . import gpu_encoder
        from .nvcomp import version

        assert gpu_encoder
        version()
    except (ImportError, Unsupported) as error:
        return str(error)
    return None
