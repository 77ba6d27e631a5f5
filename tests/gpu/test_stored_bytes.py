"""The GPU computes the digests of stored bytes in a save, and checks them in a restore before the bytes are decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding.digest import stored_digest
from raystow.storage.versions.reader import PackReader
from raystow.workers.packing import chunk_writer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

Saved = tuple[str, dict[str, torch.Tensor], Callable[[int], None]]
SIZES = (1, 3, 63, 64, 65, 1023, 1024, 1025, 2048, 3 * 1024, 5000, 128 * 1024, 129 * 1024 + 7, 1 << 20, (7 << 20) + 13)


def test_the_gpu_computes_the_digests_of_the_cpu() -> None:
    from raystow.workers.gpu.kernels import blake3_kernels

    memory = torch.randint(0, 256, (sum(SIZES) + 3 * len(SIZES),), device="cuda").to(torch.uint8)
    starts = [sum(SIZES[:i]) + 3 * i for i in range(len(SIZES))]  # of every remainder by four
    table = blake3_kernels.table_of([memory.data_ptr() + start for start in starts], SIZES)
    found = torch.empty((len(SIZES), 8), dtype=torch.uint32, device="cuda")
    scratch = torch.empty(blake3_kernels.scratch_of(SIZES), dtype=torch.uint8, device="cuda")
    blake3_kernels.stored_digests(torch.from_numpy(table).cuda(), SIZES, found, scratch)
    host = memory.cpu().numpy()
    for start, size, digest in zip(starts, SIZES, found.cpu().numpy(), strict=True):
        assert digest.tobytes() == stored_digest(host[start : start + size]), size


@pytest.mark.parametrize("process", ["training", "node"])
def test_the_gpu_computes_the_digests_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch, process: str) -> None:
    """The node worker computes the digests of small chunks, and checks the first and every 64th of the others."""
    torch.manual_seed(0)
    state = {f"m{i}": torch.randn(3 << 20, device="cuda") * 0.02 for i in range(8)}
    state |= {f"m{i}.square": state[f"m{i}"].square() for i in range(4)}  # their lowest planes are packed
    state |= {f"w{i}": torch.randn((2 << 20) + 8192 * i, device="cuda").bfloat16() for i in range(8)}
    state |= {"half": torch.randn(1 << 20, device="cuda").half(), "double": torch.randn(1 << 20, device="cuda").double()}
    state |= {"noise": torch.randint(-(1 << 31), 1 << 31, (1 << 20,), device="cuda").to(torch.int32).view(torch.float32)}
    state |= {"eight": torch.randn(1 << 20, device="cuda").to(torch.float8_e5m2), "zeros": torch.zeros(1 << 20, device="cuda")}
    state |= {"odd": torch.randn((1 << 20) + 3, device="cuda"), "small": torch.randn(99, device="cuda")}
    hashed = list[int]()

    def counted(*parts: memoryview) -> bytes:
        hashed.append(sum(map(len, parts)))
        return stored_digest(*parts)

    monkeypatch.setattr(chunk_writer, "stored_digest", counted)
    with LocalCluster(str(folder), codec="deflate", process=process) as cluster:
        for step in range(1, 3):
            hashed.clear()
            for tensor in state.values():
                tensor.view(torch.uint8).reshape(-1)[0] ^= step  # an unchanged chunk is stored as a reference
            version = cluster.save(state, step=step)
            stored = sum(chunk.coding.size for chunks in version.chunks.values() for chunk in chunks)
            assert sum(hashed) < stored / 5
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    raystow.restore_latest(str(folder), into=into)  # it checks all digests
    for name, tensor in state.items():
        assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture
def saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Return a version, its state, and a function that flips a bit in a number of the next reads."""
    state = {"w": (torch.randn(6 << 20, device="cuda") * 0.02).to(torch.bfloat16), "v": torch.randn(3 << 20, device="cuda")}
    flips, read = [0], PackReader.read

    def flipped(self: PackReader, run: object, into: memoryview | None) -> object:
        data = read(self, run, into)  # type: ignore[arg-type]
        if flips[0] and into is not None:
            flips[0] -= 1
            into[len(into) // 2] ^= 1
        return data

    with LocalCluster(str(folder), codec="deflate") as cluster:
        cluster.save(state, step=1)
    monkeypatch.setattr(PackReader, "read", flipped)
    return str(folder), state, lambda times: flips.__setitem__(0, times)


def test_bytes_changed_in_transit_are_read_again(saved: Saved) -> None:
    uri, state, flip = saved
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    flip(1)
    raystow.restore_latest(uri, into=into)
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


def test_permanent_damage_names_the_tensor(saved: Saved) -> None:
    uri, state, flip = saved
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    flip(1000)
    with pytest.raises(raystow.Damaged, match=r"tensor '[wv]'.*do not match their digest"):
        raystow.restore_latest(uri, into=into)
