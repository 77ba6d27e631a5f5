"""The software on this machine, and the Ray cluster it belongs to."""

from __future__ import annotations

import importlib.metadata
import platform

import numpy as np

from .... import __version__
from ....storage.errors import ClusterError
from .finding import Finding, ok, warning


def python() -> Finding:
    """Python and raystow."""
    return ok("python", f"Python {platform.python_version()}, raystow {__version__}, {platform.system()} {platform.machine()}")


def numba() -> Finding:
    """Whether the compiled loops run: nothing is coded or decoded without them."""
    from ....storage import kernels

    kernels.split(np.arange(64, dtype=np.uint16), True, (np.empty(64, np.uint8), np.empty(64, np.uint8)))
    return ok("numba", f"numba {importlib.metadata.version('numba')}, the compiled loops run")


def torch() -> Finding:
    """Torch, which training brings along and reading does not need."""
    try:
        import torch
    except ImportError:
        return ok("torch", "not installed", "tensors are read as numpy arrays; training processes need it")
    found = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA")
    if _older(torch.__version__, 2, 7):
        return warning("torch", found, "raystow is tested with 2.7 and later")
    return ok("torch", found)


def ray() -> Finding:
    """Ray, which saving needs and reading does not."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return ok("ray", "not installed", "this machine can list, verify and restore, but not save")
    if _older(version, 2, 50):
        return warning("ray", f"ray {version}", "raystow is tested with 2.50 and later")
    return ok("ray", f"ray {version}")


def cluster() -> Finding:
    """The Ray cluster, if this machine is part of one."""
    try:
        from ...cluster import survey

        resources = survey()
    except ImportError:
        return ok("cluster", "none: Ray is not installed")
    except ClusterError as error:
        first = error.what.splitlines()[0].split(":")[0]
        return ok("cluster", first, "saving needs one (`ray start --head`); everything else works without")
    nodes, cpus, gpus = (int(resources.get(name, 0)) for name in ("nodes", "CPU", "GPU"))
    return ok("cluster", f"reachable: nodes {nodes}, CPUs {cpus}, GPUs {gpus}")


CHECKS = (python, numba, torch, ray, cluster)


def _older(version: str, *wanted: int) -> bool:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()) < wanted
