"""Tensors in host memory are encoded by the GPU, as tensors in its memory are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpu_tensors import random_bits, same_bits, weights
from helpers.local_cluster import LocalCluster

import raystow
from raystow.state.lossy.rules import MantissaBits
from raystow.storage.coding.chunk import DEFLATE
from raystow.storage.versions.version import Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128]


def model(dtype: torch.dtype = torch.float32, n: int = 70 * MIB) -> dict[str, Any]:
    """Return enough in host memory that a GPU codes it: pinned and not, dense and strided."""
    made: dict[str, Any] = {"pinned": weights(n, dtype).cpu().pin_memory(), "plain": weights(9 * MIB + 5, dtype).cpu()}
    made["transposed"], made["gaps"] = weights(4 * MIB, dtype).cpu().reshape(1024, -1).t(), weights(8 * MIB, dtype).cpu()[::2]
    return made


def codecs(version: Version, name: str) -> set[str]:
    return {codec for row in version.chunks[name] for codec in row.coding.codecs}


def restored(cluster: LocalCluster, state: dict[str, Any]) -> dict[str, Any]:
    into = {
        name: np.zeros_like(value) if isinstance(value, np.ndarray) else torch.zeros_like(value) for name, value in state.items()
    }
    assert raystow.restore_latest(cluster.uri, into=into)
    return into


def equal(one: Any, other: Any) -> bool:
    return one.tobytes() == other.tobytes() if isinstance(one, np.ndarray) else same_bits(one, other)


def test_the_same_bytes_are_stored_as_of_a_state_on_the_gpu(folder: Path) -> None:
    state = model()
    with LocalCluster(str(folder / "host"), memory=512 * MIB, host=0, codec="deflate") as cluster:
        version = cluster.save(state, step=1)
        assert all(same_bits(state[name], tensor) for name, tensor in restored(cluster, state).items())
        assert all(DEFLATE in codecs(version, name) for name in state)
        cluster.repository.verify(version)
    with LocalCluster(str(folder / "gpu"), memory=512 * MIB, codec="deflate") as cluster:
        other = cluster.save({name: tensor.cuda() for name, tensor in state.items()}, step=1)
    assert abs(version.bytes - other.bytes) < 0.002 * other.bytes, "chunks are smaller in host memory"


@pytest.mark.parametrize("codec", ["deflate", "zstd", "raw"])
def test_all_dtypes_and_any_bits_are_restored(folder: Path, codec: str) -> None:
    state = model()
    for dtype in DTYPES:
        state[f"{dtype} any bits"] = random_bits(dtype, 700, 1030).cpu()
        state[f"{dtype} strided"] = random_bits(dtype, 700, 1030).cpu()[3::3, 5:900:2]
        state[f"{dtype} pinned"] = random_bits(dtype, 700, 1030).cpu().pin_memory()[1:]
    state |= {"array": np.random.default_rng(0).normal(size=(3000, 701)), "fortran": np.asfortranarray(np.ones((900, 801)))}
    state |= {"conjugated": random_bits(torch.complex64, 300, 301).cpu().conj(), "integers": torch.arange(3 * MIB)}
    state |= {"small": torch.randn(9), "on the gpu": weights(5 * MIB), "step": torch.tensor(3.0)}
    with LocalCluster(str(folder), memory=512 * MIB, host=0, codec=codec) as cluster:
        version = cluster.save(state, step=1)
        into = restored(cluster, state)
        cluster.repository.verify(version)
    assert [
        name for name, value in state.items() if not equal(value.resolve_conj() if name == "conjugated" else value, into[name])
    ] == []


def test_unchanged_tensors_are_stored_once(folder: Path) -> None:
    frozen = model()
    with LocalCluster(str(folder), memory=512 * MIB, host=0, codec="deflate", delta="auto") as cluster:
        first = cluster.save({**frozen, "adapter": torch.randn(40_000)}, step=0)
        for step in range(1, 5):
            state = {**frozen, "adapter": torch.randn(40_000)}
            version = cluster.save(state, step=step)
            assert version.bytes < 0.02 * first.bytes
        frozen["plain"][7] += 1
        changed = cluster.save(state, step=5)
        assert not all(row.is_reference for row in changed.chunks["plain"])
        assert all(same_bits(state[name], tensor) for name, tensor in restored(cluster, state).items())
        cluster.repository.verify(changed)


def test_weights_that_follow_from_the_master_copy_are_not_stored(folder: Path) -> None:
    state = {f"master.{name}": value for name, value in model().items()}
    state |= {"model.plain": state["master.plain"].bfloat16(), "model.pinned": state["master.pinned"].bfloat16()}
    state["master.copy"] = state["master.pinned"].clone()
    state["model.changed"] = state["model.pinned"].clone()
    state["model.changed"].view(torch.int16)[-20 * MIB] ^= 1
    with LocalCluster(str(folder), memory=512 * MIB, host=0, codec="deflate") as cluster:
        version = cluster.save(state, step=1)
        assert all(same_bits(state[name], tensor) for name, tensor in restored(cluster, state).items())
        for name in ("model.plain", "model.pinned", "master.copy"):
            assert all(row.derivation is not None for row in version.chunks[name]), name
        assert sum(row.derivation is None for row in version.chunks["model.changed"]) == 1
        cluster.repository.verify(version)


def test_weights_whose_master_copy_is_not_coded_are_checked(folder: Path) -> None:
    """The second save refers to the chunks of the first for the master copy, and stores the weights that have changed."""
    state = {"master": weights(70 * MIB, torch.float32).cpu(), "other": weights(9 * MIB, torch.float32).cpu()}
    state |= {"model": state["master"].bfloat16(), "tied": state["other"].clone()}
    with LocalCluster(str(folder), memory=512 * MIB, host=0, codec="deflate", delta="auto") as cluster:
        for step in range(4):
            state["other"] += 1
            state["tied"] = state["other"].clone()
            if step == 3:
                state["model"].view(torch.int16)[-20 * MIB] ^= 1
            version = cluster.save(state, step=step)
            assert all(same_bits(state[name], tensor) for name, tensor in restored(cluster, state).items())
        assert all(row.derivation is not None for row in version.chunks["tied"])
        assert all(row.is_reference for row in version.chunks["master"])
        assert 0 < version.tensors()["model"].stored <= 8 * MIB
        cluster.repository.verify(version)


@pytest.mark.parametrize("rounded", [MantissaBits(9), None])
def test_weights_of_a_rounded_master_copy_are_checked(folder: Path, rounded: MantissaBits | None) -> None:
    """Weights follow from the exact master copy; tied tensors are rounded alike."""
    master = weights(70 * MIB, torch.float32).cpu()
    state = {"master": master, "model": master.bfloat16(), "master.tied": master.clone()}
    lossy = {"master": rounded} if rounded else None
    with LocalCluster(str(folder), memory=512 * MIB, host=0, codec="deflate", lossy=lossy) as cluster:
        version = cluster.save(state, step=1)
        into = restored(cluster, state)
        assert same_bits(into["model"], state["model"])
        assert same_bits(into["master"], into["master.tied"])
        assert same_bits(into["master"], master) is (rounded is None)
        assert not version.tensors()["model"].stored
        assert not version.tensors()["master.tied"].stored
        cluster.repository.verify(version)


def test_rounded_tensors_are_those_of_the_gpu(folder: Path) -> None:
    state, rules = model(), {"pinned": MantissaBits(5), "plain": MantissaBits(9)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    found = []
    for name, host, device in (("host", 0, "cpu"), ("gpu", None, "cuda")):
        with LocalCluster(str(folder / name), memory=512 * MIB, host=host, codec="deflate", lossy=rules) as cluster:
            cluster.save({name: tensor.to(device) for name, tensor in state.items()}, step=1)
            found.append(restored(cluster, state))
    assert all(same_bits(found[0][name], found[1][name]) for name in state)
    assert not same_bits(found[0]["plain"], state["plain"])
    assert all(same_bits(before[name], tensor) for name, tensor in state.items()), "the training has its own"
