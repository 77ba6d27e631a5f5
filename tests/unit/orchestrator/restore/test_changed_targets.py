"""A target that is written to while it is filled is an error that names it. The version is not called damaged, nor read again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.scripted_store import ScriptedStore, script
from msgspec.structs import replace

import raystow
from raystow.storage.coding import chunk as chunks
from raystow.storage.coding.kernels import Bytes
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.reader import Request
from raystow.storage.versions.version import Version


@pytest.fixture
def version() -> Version:
    """Return the second version of a master copy, which is a delta, of weights derived from it, and of noise."""
    torch.manual_seed(0)
    master = torch.randn(20_000)
    with LocalCluster(ScriptedStore.named(f"changed-targets-{SYSTEM.token()}").uri, codec="cpu", delta=3) as cluster:
        for step in range(2):
            master += 1e-6 * torch.randn(20_000)
            noise = torch.randint(-(1 << 31), 1 << 31, (5000,)).to(torch.int32)
            version = cluster.save({"master": master, "weights": master.bfloat16(), "noise": noise}, step=step)
    rows = {name: row for name, (row,) in version.chunks.items()}
    assert rows["master"].coding.base == 1
    assert rows["weights"].derivation is not None
    return version


def write_into(target: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something write to the memory of ``target`` when a chunk has been decoded into it."""
    decode, memory = chunks.decode, target.view(torch.uint8).numpy()

    def decode_and_change(coding: Any, dtype: Any, stored: Bytes, raw: Bytes, base: Bytes | None = None) -> None:
        decode(coding, dtype, stored, raw, base)
        if np.may_share_memory(raw, memory):
            raw[77] ^= 1

    monkeypatch.setattr(chunks, "decode", decode_and_change)


def blank(version: Version) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(version.read(name)) for name in version.chunks}


@pytest.mark.parametrize("name", ["master", "noise"])
def test_the_error_names_the_target_and_nothing_falls_back(
    version: Version, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    into, reads, read = blank(version), list[str](), version.store.get_range_into

    def noted(key: str, start: int, target: memoryview) -> None:
        reads.append(f"{key} {start}")
        read(key, start, target)

    script(version.store, get_range_into=noted)
    write_into(into[name], monkeypatch)
    with pytest.raises(raystow.StateError, match=f"tensor '{name}': its memory was changed while it was filled"):
        raystow.restore_latest(version.store.uri, into=into)
    assert len(reads) == len(set(reads))
    assert "DAMAGED" not in caplog.text


def test_wrong_stored_bytes_are_damage_in_any_target(version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    into = blank(version)
    (row,) = version.chunks["noise"]
    write_into(into["noise"], monkeypatch)
    target = into["noise"].numpy().view("V4")
    request = Request("noise", [replace(row, raw_digest=row.raw_digest ^ np.uint64(1))], ((0,), (5000,)), target)
    with pytest.raises(raystow.Damaged, match=r"tensor 'noise', .*decoded bytes do not match their digest"):
        version.reader().fill([request])
