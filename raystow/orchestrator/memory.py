"""How much host memory saving takes, where nobody says."""

from __future__ import annotations

import os

from .planner import SavePlan

_DEFAULT = 1 << 30
_SLACK = 256 << 20


def share_of_memory(plan: SavePlan) -> int:
    """Bytes for one rank: enough for a whole save of its part of a state on GPUs, so that staging does not wait for uploads, but
    no more than the rank's part of half the machine. A GiB for states in host memory, which never wait for a GPU."""
    if not plan.ready:
        return _DEFAULT
    import torch

    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = machine // 2 // max(1, int(torch.cuda.device_count()))
    return max(_DEFAULT, min(plan.nbytes * 8 // 7 + _SLACK, share))
