"""Saving from a GPU: odd sizes, large tensors, restores across devices, and bounded device memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from helpers.gpu_tensors import same_bits, weights
from helpers.local_cluster import LocalCluster

import raystow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20


@pytest.mark.parametrize("codec", ["deflate", "zstd", "ans", "raw"])
def test_odd_sizes_and_values_are_restored(codec: str) -> None:
    nan = torch.randint(0, 1 << 16, (3 * MIB + 7,), device="cuda").to(torch.int32).to(torch.int16).view(torch.bfloat16)
    state = {
        "one": weights(1, torch.float32),
        "three": weights(3),
        "small": weights(700, torch.float64),
        "a byte over a chunk": torch.randint(0, 255, (16 * MIB + 1,), dtype=torch.uint8, device="cuda").view(torch.float8_e5m2),
        "odd": weights(9 * MIB + 5),
        "even, not by 16": weights(5 * MIB + 2, torch.float32),
        "never negative": weights(6 * MIB, torch.float32).square(),
        "never negative, odd": weights(6 * MIB + 3).abs(),
        "zeros": torch.zeros(40 * MIB, device="cuda"),
        "any bits, NaNs with payloads too": nan,
        "view": weights(8 * MIB).reshape(1024, -1)[3:1000, 5:],
        "transposed": weights(4 * MIB, torch.float32).reshape(1024, -1).t(),
        "not where four bytes begin": weights(MIB)[1:],
        "incompressible": torch.randint(-(1 << 31), 1 << 31, (4 * MIB,), device="cuda").to(torch.int32).view(torch.float32),
        "integers": torch.arange(3 * MIB, device="cuda"),
        "host": torch.randn(1000),
    }
    with LocalCluster(f"memory://odd-{codec}", memory=256 * MIB, codec=codec) as cluster:
        version = cluster.save(state, step=1)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert raystow.restore_latest(cluster.uri, into=into)
    for name, tensor in state.items():
        assert same_bits(into[name], tensor), name
        if codec != "ans":
            assert same_bits(version.read(name), tensor), name
    if codec == "ans":
        with pytest.raises(raystow.Unsupported, match="GPU"):
            version.read("odd")
    if codec != "raw":
        assert version.tensors()["odd"].stored < 0.75 * version.tensors()["odd"].nbytes
        assert version.tensors()["never negative"].stored < 0.85 * version.tensors()["never negative"].nbytes


def test_a_tensor_of_three_gib_is_restored(folder: Path) -> None:
    state = {"w": weights(3 << 29)}
    with LocalCluster(str(folder), memory=1 << 30) as cluster:
        cluster.save(state, step=1)
        into = {"w": torch.zeros_like(state["w"])}
        raystow.restore_latest(cluster.uri, into=into)
    assert torch.equal(into["w"].view(torch.int16), state["w"].view(torch.int16))


def test_cpu_and_gpu_states_are_restored_on_either_device() -> None:
    state = {
        "w": weights(3000 * 4096, torch.float32).reshape(3000, 4096),
        "i": torch.arange(5 * MIB, device="cuda"),
    }
    with LocalCluster("memory://sides") as cluster:
        for step, saved in enumerate(({k: v.cpu() for k, v in state.items()}, state)):
            cluster.save(saved, step=step)
            for place in ("cpu", "cuda"):
                into = {name: torch.zeros_like(tensor, device=place) for name, tensor in state.items()}
                raystow.restore_latest(cluster.uri, into=into)
                assert all(same_bits(into[name], state[name]) for name in state), (step, place)
                holes = {"w": torch.zeros(3000, 8192, device=place)[:, ::2], "i": into["i"]}
                raystow.restore_latest(cluster.uri, into=holes)
                assert same_bits(holes["w"], state["w"])


def test_device_memory_is_bounded_and_freed(folder: Path) -> None:
    with LocalCluster("memory://first", memory=256 * MIB) as cluster:  # loads the kernels, whose memory stays in the CUDA context
        cluster.save({"w": weights(16 * MIB), "m": weights(16 * MIB, torch.float32)}, step=0)
    state = {f"layer{i}": weights(256 * MIB, torch.float32 if i % 2 else torch.bfloat16) for i in range(4)}
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    with LocalCluster(str(folder), memory=4 << 30) as cluster:
        for step in range(2):
            cluster.save(state, step=step)
        assert torch.cuda.max_memory_allocated() - before <= 1536 * MIB
        assert free - torch.cuda.mem_get_info()[0] <= 1536 * MIB
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 16 * MIB
