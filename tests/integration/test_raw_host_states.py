"""Tensors in host memory are stored raw where coding would delay the save, and restored bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding.chunk import RAW, ZSTD


@pytest.mark.usefixtures("coding_is_slow")
@pytest.mark.parametrize("memory", [1 << 30, 16 << 20], ids=["the ring takes a save", "the ring is small"])
def test_a_fast_store_gets_raw_floats(tmp_path: Path, memory: int) -> None:
    draw = torch.Generator().manual_seed(0)
    frozen = {"frozen": torch.randn(3_000_001, generator=draw)}
    with LocalCluster(f"memory://{tmp_path.name}", memory=memory, raw=True, delta="auto", threads=1) as cluster:
        for step in range(4):
            state = {
                **frozen,
                "weights": torch.randn(2_000_003, generator=draw).bfloat16(),
                "strided": torch.randn(2000, 1001, generator=draw).t(),
                "array": np.random.default_rng(step).normal(size=(1000, 701)),
                "integers": torch.arange(1 << 20) + step,
                "small": torch.randn(9, generator=draw),
            }
            version = cluster.save(state, step=step)
            into = {name: np.zeros_like(one) if name == "array" else torch.zeros_like(one) for name, one in state.items()}
            assert raystow.restore_latest(cluster.uri, into=into) is not None
            assert np.array_equal(into.pop("array"), state.pop("array"))
            assert all(torch.equal(into[name], one) for name, one in state.items())
        cluster.repository.verify(version)
        codecs = {name: {codec for row in rows for codec in row.coding.codecs} for name, rows in version.chunks.items()}
        assert codecs["weights"] == codecs["strided"] == codecs["array"] == {RAW}
        assert ZSTD in codecs["integers"]
        assert all(row.is_reference for row in version.chunks["frozen"]), "what has not changed is stored once"
        assert "the store takes" in version.record.coding[RAW]
