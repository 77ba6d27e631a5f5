"""Checks of the software on this machine, and of its Ray cluster."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys

import numpy as np

from ..._version import __version__
from ...storage.coding import kernels
from ...storage.format import capacity
from ...storage.limits import MAX_DEPTH, MAX_NAME, MAX_ROWS, MAX_TEXT
from .finding import Finding, damaged, ok, warning

TIMEOUT = 20.0
"""Seconds to wait for the Ray cluster."""

_ASK = """
import json
from raystow.orchestrator.ray_cluster import survey
from raystow.storage.errors import ClusterError
try:
    answer = survey()
except ClusterError as error:
    answer = {"none": error.what}
print(json.dumps(answer))
"""


def python() -> Finding:
    """Return the versions of Python and raystow."""
    return ok(f"Python {platform.python_version()}, raystow {__version__}, {platform.system()} {platform.machine()}")


def loops() -> Finding:
    """Check that coding runs compiled loops."""
    kernels.split(np.arange(64, dtype=np.uint16), True, (np.empty(64, np.uint8), np.empty(64, np.uint8)))
    if kernels.library() is not None:
        return ok("compiled ahead of time")
    return warning("numpy codes, at a seventh of the speed", "for speed, use x86-64 with AVX2, or aarch64")


def binaries() -> Finding:
    """Check that compiled code is of the installed sources, and that its files are those that were installed."""
    wrong, found = dict[str, str](), "as their sources and the installation say"
    source = hashlib.sha256(kernels.SOURCE.read_bytes()).hexdigest().encode()
    wrong |= {path.name: "was built from other sources" for path in kernels.LIBRARIES.values() if source not in path.read_bytes()}
    if importlib.util.find_spec("torch") is None:
        found += "; kernels for GPUs were not checked: torch is missing"
    else:
        from ...workers.gpu.kernels.library import SHIPPED, Architecture, sources_digest

        sources = sources_digest()
        for name in SHIPPED:
            try:
                if Architecture(name).sources != sources:
                    wrong[name] = "was built from other sources"
            except Exception as error:  # of the decompressor, of JSON, of the file system
                wrong[name] = f"cannot be read: {error}"
    for file in importlib.metadata.files("raystow") or ():
        if file.suffix in (".so", ".zst") and file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                wrong[file.name] = "is not the file that was installed"
    if wrong:
        return damaged("; ".join(f"{name} {what}" for name, what in wrong.items()), "install raystow again")
    return ok(found)


def torch() -> Finding:
    """Check torch, which training needs and reading does not."""
    try:
        import torch
    except ImportError:
        return ok("not installed", "tensors are read as numpy arrays; training processes need it")
    found = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA")
    if _older(torch.__version__, 2, 7):
        return warning(found, "raystow is tested with 2.7 and later")
    return ok(found)


def ray() -> Finding:
    """Check Ray, which saving needs and reading does not."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return ok("not installed", "this machine can list, verify and restore, but not save")
    if _older(version, 2, 50):
        return warning(f"ray {version}", "raystow is tested with 2.50 and later")
    return ok(f"ray {version}")


def cluster() -> Finding:
    """Check the Ray cluster, if this machine is part of one."""
    if importlib.util.find_spec("ray") is None:
        return ok("none: Ray is not installed")
    try:
        answer = survey()
    except subprocess.TimeoutExpired:
        follows = "its head may be dead, or it may want a token (RAY_AUTH_MODE=token); set RAY_ADDRESS to another cluster"
        return warning(f"it did not answer within {TIMEOUT:.0f} s", follows)
    if "none" in answer:
        first = str(answer["none"]).splitlines()[0].split(":")[0]
        return ok(first, "saving needs one (`ray start --head`); everything else works without it")
    nodes, cpus, gpus = (int(str(answer.get(name, 0)).partition(".")[0]) for name in ("nodes", "CPU", "GPU"))
    return ok(f"reachable: nodes {nodes}, CPUs {cpus}, GPUs {gpus}")


def survey() -> dict[str, object]:
    """Return the result of ``ray_cluster.survey``, or ``{"none": why}``; raise ``TimeoutExpired`` if Ray does not answer.

    Runs in a process of its own, since Ray tries to reach a dead head for many minutes, and only a signal stops it.
    """
    ask = f"import sys; sys.path[:] = {sys.path!r}\n{_ASK}"  # else modules of the current folder would come first
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["Ray died"])[-1])
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def bounds() -> Finding:
    """Return what a version and a repository hold at most, in the user's terms."""
    version = f"a version: about {capacity.RANKS:,} ranks, 8 on a node"
    node = f"a node: {MAX_ROWS:,} chunks and plain values, in chunks of 4 MiB {MAX_ROWS >> 18} TiB"
    texts = f"their names and texts: {MAX_TEXT >> 30} GiB"
    names = f"a name: {MAX_NAME:,} characters, {MAX_DEPTH} parts"
    return ok("; ".join((version, node, texts, names, f"a repository: about {capacity.VERSIONS:,} versions")))


CHECKS = {
    "python": python,
    "loops": loops,
    "binaries": binaries,
    "torch": torch,
    "ray": ray,
    "cluster": cluster,
    "bounds": bounds,
}


def _older(version: str, *least: int) -> bool:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()) < least
