"""Weights on a GPU that are the rounded master copy are stored without bytes and restored by rounding the master copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.chunk_sources import Follower, Source
from helpers.colliding_tensors import colliding_tensors
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding.derived import followed
from raystow.workers.gpu.encode.derived_check import check_derived

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

N = 9_000_001


def test_the_gpu_and_the_cpu_find_the_same_derived_chunks() -> None:
    followers = list[Follower]()

    def follow(tensor: torch.Tensor, source: torch.Tensor) -> None:
        followers.append(Follower(Source(str(len(followers)), tensor), Source("source", source)))

    for n in (4096, 4097, 100_003, 4 << 20):
        bits = torch.randint(-(2**31), 2**31, (n,), device="cuda").to(torch.int32).view(torch.float32)
        numbers = torch.where(bits.isnan(), torch.randn(n, device="cuda"), bits)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = numbers.to(dtype)
            changed = rounded.clone()
            changed.view(torch.int16)[n - 1] ^= 1
            follow(rounded, numbers)
            follow(changed, numbers)
            follow(bits.to(dtype), bits)  # with NaNs among them
            follow(rounded.clone(), rounded)
            follow(changed, rounded)
    found = check_derived({}, 0, followers)
    found.begin(after=torch.cuda.current_stream().record_event())
    said = {one.info.name: one.digest for one in found.derived}
    assert {one.piece.name for one in found.strays} == {one.piece.name for one in followers} - set(said)
    for one in followers:
        raw, words = (np.frombuffer(chunk.bytes, np.uint8) for chunk in (one.piece, one.source))
        names = one.source.dtype.name, one.piece.dtype.name
        assert said.get(one.piece.name) == followed(raw, words, *names), names
    assert 0 < len(found.strays) < len(followers)
    nothing = check_derived({}, 0, [])
    nothing.begin(after=torch.cuda.current_stream().record_event())
    assert not nothing.derived
    assert not nothing.strays


def test_tensors_of_equal_digests_are_not_derived(tmp_path: Path) -> None:
    """Neither as a copy, nor as the rounded master copy."""
    one, other = (torch.from_numpy(value).cuda() for value in colliding_tensors())
    half = other.view(torch.bfloat16)
    state = {"w.half": half, "optim.half": one.view(torch.bfloat16).float(), "w.copy": other, "w.first": one}
    with LocalCluster(str(tmp_path), memory=256 << 20) as cluster:
        version = cluster.save(state, step=1)
        assert all(info.stored for info in version.tensors().values())
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        raystow.restore_latest(cluster.uri, into=into)
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
        again = cluster.save({**state, "w.half": one.view(torch.bfloat16), "w.copy": one}, step=2)
        assert not again.tensors()["w.half"].stored
        assert not again.tensors()["w.first"].stored


def mixed(stray: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b, c = (torch.randn(N, generator=generator, device="cuda") * 0.02 for _ in range(3))
    state = {"w.a": a.bfloat16(), "w.b": b.half(), "optim.a": a, "optim.b": b, "optim.m": c, "tied": c.clone()}
    state["tied.b"] = state["w.b"]
    if stray is not None:
        state["w.a"].view(torch.int16)[stray] ^= 1
    return state


@pytest.mark.parametrize("place", ["training", "node"])
@pytest.mark.parametrize("codec", ["deflate", "ans", "cpu"])
def test_derived_tensors_take_no_bytes_and_are_restored(tmp_path: Path, codec: str, place: str) -> None:
    if (codec, place) == ("cpu", "node"):
        pytest.skip("this codec encodes nothing on a GPU")
    with LocalCluster(str(tmp_path), codec=codec, process=place, memory=256 << 20) as cluster:
        for step, stray in enumerate((None, N // 2, None)):
            state = mixed(stray)
            version = cluster.save(state, step=step)
            sizes = {name: info.stored for name, info in version.tensors().items()}
            assert {name for name, size in sizes.items() if not size} == {"w.b", "tied", "tied.b"} | ({"w.a"} - {stray and "w.a"})
            if stray is not None:
                assert sizes["w.a"] <= 8 << 20, "more than the chunk that is not derived was stored"
            for names in (list(state), ["w.a", "w.b"], ["tied"], ["optim.a", "w.a"]):
                into = {name: torch.zeros_like(state[name]) for name in names}
                raystow.restore_latest(cluster.uri, into=into, strict=False)
                for name in names:
                    assert torch.equal(into[name], state[name]), (step, name)
            if codec != "ans":
                part = {"w.a": torch.zeros(N, device="cuda")}
                raystow.restore_latest(cluster.uri, into=part, strict=False, cast=True)
                assert torch.equal(part["w.a"], state["w.a"].float())
                raystow.open(cluster.uri).verify(version, deep=True)
                assert torch.equal(version.read("w.b", slice(5, N - 3)), state["w.b"].cpu()[5 : N - 3])


@pytest.mark.parametrize("place", ["training", "node"])
def test_a_chunk_with_a_nan_is_not_derived(tmp_path: Path, place: str) -> None:
    state = mixed()
    state["optim.a"][N // 2] = float("nan")
    state["w.a"] = state["optim.a"].bfloat16()
    with LocalCluster(str(tmp_path), process=place, memory=256 << 20) as cluster:
        version = cluster.save(state, step=1)
        sizes = {name: info.stored for name, info in version.tensors().items()}
        assert 0 < sizes["w.a"] <= 8 << 20, "more than the chunk with the NaN was stored"
        assert not sizes["w.b"]
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        raystow.restore_latest(cluster.uri, into=into)
    for name, tensor in state.items():
        assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), name
