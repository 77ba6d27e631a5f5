"""``raystow doctor`` compares compiled code with its sources, and with what was installed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

import pytest

from raystow.cli.checks import software
from raystow.cli.checks.finding import Status
from raystow.storage.coding import kernels
from raystow.workers.gpu.kernels import library


def test_doctor_compares_compiled_code_with_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.binaries().status is Status.OK
    (tmp_path / "byte_loops.c").write_bytes(kernels.SOURCE.read_bytes() + b"// changed")
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "byte_loops.c")
    monkeypatch.setattr(library, "sources_digest", lambda: "0" * 64)
    found = software.binaries()
    assert (found.status, found.code, found.follows) == (Status.FAILED, 3, "install raystow again")
    for name in (*(path.name for path in kernels.LIBRARIES.values()), *library.SHIPPED):
        assert f"{name} was built from other sources" in found.found


def test_doctor_compares_compiled_code_with_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the digests that pip has recorded."""
    info, file = tmp_path / "raystow-0.1.0.dist-info", tmp_path / "raystow" / "loops.so"
    for folder in (info, file.parent):
        folder.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"installed").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"raystow/loops.so,sha256={digest},9\n")
    (info / "METADATA").write_text("Name: raystow\nVersion: 0.1.0\n")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: importlib.metadata.PathDistribution(info).files)
    file.write_bytes(b"installed")
    assert software.binaries().status is Status.OK
    file.write_bytes(b"exchanged")
    assert software.binaries().found == "loops.so is not the file that was installed"
