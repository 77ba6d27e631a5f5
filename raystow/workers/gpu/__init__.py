"""Coding on NVIDIA GPUs: CUDA, Triton and nvCOMP stand in this folder and nowhere else."""

from __future__ import annotations

from ...storage.errors import Unsupported


def missing() -> str | None:
    """Why this process cannot code on a GPU (torch, Triton or nvCOMP are not what they must be); None if it can."""
    try:
        from . import gpu_encoder
        from .nvcomp import version

        assert gpu_encoder
        version()
    except (ImportError, Unsupported) as error:
        return str(error)
    return None
