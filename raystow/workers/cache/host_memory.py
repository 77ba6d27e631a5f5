"""How much memory this machine, or the container around this process, has."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # cgroup 2, cgroup 1


def memory_limit() -> int:
    """Bytes: the machine's, or the container's limit if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            pass  # no such limit, or "max"
    return min(limits)
