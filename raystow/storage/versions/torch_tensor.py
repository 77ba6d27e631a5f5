"""Elements as a torch tensor, where there is torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..coding.kernels import Words
from ..errors import Unsupported


def as_torch(raw: Words, name: str) -> Any:
    """The elements of dtype ``name`` as a torch tensor; None without torch. Raises ``Unsupported`` if torch lacks the dtype."""
    try:
        import torch
    except ImportError:
        return None
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise Unsupported(f"torch {torch.__version__} has no {name}", subject=name, remedy="upgrade torch")
    if raw.size == 0:
        return torch.empty(raw.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(raw.reshape(-1).view(np.uint8), dtype=torch.uint8).view(dtype).reshape(raw.shape)
