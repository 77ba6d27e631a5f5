"""How much memory this machine, or the control groups around this process, have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_limit(cgroups: Path = CGROUPS, own: Path = _OWN) -> int:
    """Bytes: the machine's, or those of a container, or of a job of Slurm or systemd, if that is less. ``cgroups``: where
    control groups are mounted. ``own``: the file that names those of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in control_groups("memory", cgroups, own):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup 2, cgroup 1
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):
                pass  # no such limit, or "max"
    return min(limits)


def control_groups(controller: str, cgroups: Path = CGROUPS, own: Path = _OWN) -> Iterator[Path]:
    """Yield the folders of all control groups around this process, of cgroup 2 and of a controller of cgroup 1. Each may have a
    limit. A container sees its own group as the outermost one, or by a path that is not there."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    yield from (cgroups, cgroups / controller)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = cgroups / controller if controllers else cgroups
        for part in Path(path).parts[1:]:
            if part == "..":  # outside of what this container sees
                break
            folder /= part
            yield folder
