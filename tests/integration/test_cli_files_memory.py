"""Safetensors files are imported, and versions exported, in memory that does not grow with their size."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest

from integration.cli_runner import run
from raystow.cli import import_command
from raystow.orchestrator.export import version_files
from raystow.storage.stores import open_store

MIB = 1 << 20
STATE = 320 * MIB
ALLOWED = 160 * MIB  # import may use 32 MiB, other commands slabs of 16 MiB; the rest is for threads and libraries
UPLOADED = 96 * MIB  # RequestLimits.stream_bytes, the part that is filled, and the one that obstore reads into


def model(path: Path) -> None:
    """Write a file with one tensor of ``STATE`` bytes: random numbers, which hardly compress, repeated."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [STATE // 4], "data_offsets": [0, STATE]}}).encode()
    header += b" " * (-len(header) % 8)
    tile = np.random.default_rng(0).standard_normal(4 * MIB, np.float32).tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(STATE // len(tile)):
            file.write(tile)


@contextmanager
def memory_limit(most: int) -> Iterator[None]:
    """Assert that this process never uses ``most`` bytes more than at the start. Pages of mapped files do not count, because
    the system can evict them."""

    def used() -> int:
        info = psutil.Process().memory_info()
        return int(info.rss - info.shared)

    before, peak, over = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert 0 < peak - before < most, f"{(peak - before) / MIB:.0f} MiB"


@pytest.mark.s3
@pytest.mark.long
def test_large_files_are_imported_and_exported_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_uri: str
) -> None:
    monkeypatch.setattr(import_command, "MEMORY", 32 * MIB)
    monkeypatch.setattr(version_files, "SLAB", 16 * MIB)
    model(tmp_path / "model.safetensors")
    with memory_limit(ALLOWED):
        assert run("import", tmp_path / "model.safetensors", tmp_path / "run").exit_code == 0
    with memory_limit(ALLOWED):
        assert run("restore", tmp_path / "run", "--output", tmp_path / "out").exit_code == 0
    with memory_limit(ALLOWED):
        assert run("export", tmp_path / "run", "--hf", tmp_path / "hf", "--dtype", "bfloat16").exit_code == 0
    with memory_limit(ALLOWED):
        assert run("cp", tmp_path / "run", tmp_path / "replica", "--memory", "64MiB").exit_code == 0
    with memory_limit(ALLOWED + UPLOADED):
        assert run("restore", tmp_path / "run", "--output", f"{s3_uri}/all").exit_code == 0
    with memory_limit(ALLOWED + UPLOADED):
        assert run("export", tmp_path / "run", "--hf", f"{s3_uri}/hf", "--dtype", "bfloat16").exit_code == 0
    sizes = {one.key: one.size for one in open_store(s3_uri).list("")}
    assert sizes["all/weights.safetensors"] == (tmp_path / "out/weights.safetensors").stat().st_size
    assert sizes["hf/model.safetensors"] == (tmp_path / "hf/model.safetensors").stat().st_size
    files = [
        np.memmap(path, np.uint8, "r")[-STATE:] for path in (tmp_path / "model.safetensors", tmp_path / "out/weights.safetensors")
    ]
    assert all(np.array_equal(files[0][at : at + 16 * MIB], files[1][at : at + 16 * MIB]) for at in range(0, STATE, 16 * MIB))
    converted = np.memmap(tmp_path / "hf" / "model.safetensors", np.uint8, "r")[-STATE // 2 :]
    for at in range(0, STATE, 16 * MIB):
        expected = files[0][at : at + 16 * MIB].view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
        assert np.array_equal(converted[at // 2 : at // 2 + 8 * MIB], expected)
