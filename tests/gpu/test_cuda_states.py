"""State on a GPU is saved and restored bit for bit, with encoding on the GPU and on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.builders import complement, complemented, memory_repository, rows_and_pack, whole, write_rows
from helpers.gpu_tensors import layouts, same_bits
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding import chunk
from raystow.storage.commit.committer import Committer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("codec", ["deflate", "zstd", "raw", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_restored_on_a_gpu_and_on_a_cpu(dtype: torch.dtype, codec: str) -> None:
    state = layouts(dtype)
    with LocalCluster(f"memory://cuda-{dtype}-{codec}", codec=codec) as cluster:
        version = cluster.save(state, step=1)
    into = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in state.items()}
    raystow.restore_latest(cluster.uri, into=into)
    for name, tensor in state.items():
        assert into[name].is_cuda
        assert same_bits(into[name], tensor), name
        assert same_bits(version.read(name), tensor), name


def test_a_save_waits_for_writes_of_a_side_stream() -> None:
    tensor = torch.zeros(64 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), LocalCluster("memory://cuda-stream", memory=256 << 20) as cluster:
        for _ in range(200):
            tensor.add_(1)  # some hundred milliseconds of queued work
        version = cluster.save({"w": tensor}, step=1)
    assert torch.equal(version.read("w"), torch.full((64 << 20,), 200.0))


def test_a_codec_that_the_gpu_lacks_is_decoded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunk.STREAMED, "complement", complement)
    arrays = {name: np.random.default_rng(0).normal(size=100_000).astype(np.float32) for name in ("new", "known")}
    rows, pack = complemented(*rows_and_pack({name: whole(array) for name, array in arrays.items()}), "new")
    into = {name: torch.zeros(100_000, device="cuda") for name in arrays}
    raystow.restore(write_rows(Committer(memory_repository(), "me"), rows, pack), into)
    assert all(torch.equal(into[name].cpu(), torch.from_numpy(array)) for name, array in arrays.items())
