"""Checks of the GPUs, cores and memory that this process may use."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...workers.cache.host_memory import control_groups
from ...workers.shm.ring import SLOT, Ring
from ..output import count, size
from .finding import Finding, ok, warning

_DRIVER = Path("/proc/driver/nvidia/version")
_MEMINFO = Path("/proc/meminfo")
_SHM = Path("/dev/shm")
_RANK = 1 << 30  # bytes that a Checkpointer uses per rank by default
_NO_IPC = "only training processes can compress GPU tensors, not the node worker; a known cause is expandable_segments:True"
_UNLIMITED = 1 << 60  # bytes; cgroup v1 represents "no limit" by a number near 2**63


def gpus(version: Path = _DRIVER) -> Finding:
    """Check the GPUs that torch sees, and the driver. ``version``: the file in which that describes itself."""
    driver = _driver(version)
    if importlib.util.find_spec("torch") is None:
        return ok(f"not checked: torch is missing ({driver or 'no NVIDIA driver'})")
    import torch

    if torch.cuda.is_available():
        from ...workers.gpu.kernels.library import architecture

        numbers = range(torch.cuda.device_count())
        found = [torch.cuda.get_device_properties(i) for i in numbers]
        kernels = ", ".join(sorted({architecture(i).name for i in numbers}))
        named = ", ".join(f"{p.name} ({size(p.total_memory)})" for p in found)
        return ok(f"{named}; {driver or 'driver unknown'}; compiled kernels: {kernels}")
    if driver:
        return warning(f"{driver}, but torch sees no GPU", "install a CUDA build of torch, or give this process a GPU")
    return ok("none", "tensors are compressed on the CPU")


def cuda_ipc() -> Finding:
    """Check whether GPU memory can be shared with another process."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            from torch.multiprocessing.reductions import reduce_tensor

            try:
                reduce_tensor(torch.zeros(1 << 20, device="cuda"))
            except RuntimeError as error:
                return warning(str(error).splitlines()[0], _NO_IPC)
            return ok("a handle to GPU memory can be exported")
    return ok("not checked: no GPU")


def shared_memory() -> Finding:
    """Check that a staging ring can be created, and the memory available for it."""
    if not hasattr(os, "memfd_create"):
        return warning("memfd is not available", "saving needs Linux; everything else works")
    ring = Ring.create(2 * SLOT)
    try:
        ring.slot(1)[:] = 1
    finally:
        ring.close()
    free = _available()
    if free is None:
        return ok("a staging ring (memfd) works; limit unknown")
    found = f"a staging ring (memfd) works; up to {size(free)} of memory is available for rings"
    if free < _RANK:
        return warning(found, f"a rank uses {size(_RANK)}: lower Checkpointer(memory=...), or raise the container's limit")
    return ok(found)


def dev_shm() -> Finding:
    """Check ``/dev/shm``, which Ray's object store and NCCL use, and raystow does not."""
    if not _SHM.is_dir():
        return ok("missing; raystow does not use it")
    total, _, free = shutil.disk_usage(_SHM)
    found = f"{size(free)} of {size(total)} free"
    if total < 1 << 30:
        return warning(found, "raystow does not use it, but Ray and NCCL do: in a container, mount a larger one")
    return ok(found, "raystow does not use it; Ray and NCCL do")


def cores() -> Finding:
    """Check the cores this process may use, and the container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    found = count(usable, "core") + (f", limited by a quota to {quota:.1f}" if quota is not None and quota < usable else "")
    if min(usable, quota or usable) < 2:
        return warning(found, "coding and training share one core")
    return ok(found)


def memory() -> Finding:
    """Check the memory of the machine, or the container's limit."""
    total, free, limit = _meminfo("MemTotal"), _available(), _cgroup_memory()
    if total is None or free is None:
        return ok("unknown: there is no /proc/meminfo")
    found = f"{size(free)} available of {size(limit[0] if limit else total)}" + (" (the container's limit)" if limit else "")
    if free < 2 * _RANK:
        return warning(found, f"a rank uses {size(_RANK)} for saving: lower Checkpointer(memory=...)")
    return ok(found)


CHECKS = {
    "gpus": gpus,
    "cuda ipc": cuda_ipc,
    "shared memory": shared_memory,
    "/dev/shm": dev_shm,
    "cores": cores,
    "memory": memory,
}


def _driver(version: Path) -> str:
    with_version = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", _text(version))
    return f"NVIDIA driver {with_version[1]}" if with_version else ""


def _available() -> int | None:
    """Bytes that this process can still allocate, by the machine and its container."""
    free, limit = _meminfo("MemAvailable"), _cgroup_memory()
    return free if free is None or limit is None else max(0, min(free, limit[0] - limit[1]))


def _meminfo(name: str) -> int | None:
    line = re.search(rf"^{name}:\s+(\d+) kB$", _text(_MEMINFO), re.MULTILINE)
    return int(line[1]) << 10 if line else None


def _cgroup_memory() -> tuple[int, int] | None:
    """The container's limit and use in bytes, by cgroup v2 or v1; None without a limit."""
    found = [
        *_pairs("memory", "memory.max", "memory.current"),
        *_pairs("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _quota() -> float | None:
    """Cores that the container may use, by cgroup v2 or v1; None without a quota."""
    shares = [*_pairs("cpu", "cpu.max"), *_pairs("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    return min((quota / period for quota, period in shares), default=None)


def _pairs(controller: str, *names: str) -> Iterator[tuple[int, int]]:
    """Yield two numbers in files of each control group, unless a file is missing or says that there is no limit."""
    for folder in control_groups(controller):
        words = " ".join(_text(folder / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[0]) < _UNLIMITED:
            yield int(words[0]), int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
