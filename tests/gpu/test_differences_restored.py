"""Deltas to earlier versions are decoded on a GPU: the bases are uploaded with the deltas and added on the GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import blake3
import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding import kernels as host
from raystow.storage.coding.digest import finish, raw_digest
from raystow.storage.format import keys
from raystow.storage.versions.reader import Request
from raystow.storage.versions.version import Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

GOLDEN = Path(__file__).parents[1] / "compat" / "golden-deltas"
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def test_the_kernel_adds_the_same_words_as_the_cpu() -> None:
    from raystow.workers.gpu import kernel_args
    from raystow.workers.gpu.kernels import word_kernels

    random = np.random.default_rng(0)
    for width, word in host.WORDS.items():
        rows, kept = [], []
        for n in (1, 7, 4096, 65_537, 3_000_001):
            words = random.integers(0, 256, n * width, np.uint8).view(word)
            base = words + random.integers(0, 9, n).astype(word)
            base[::5] = random.integers(0, 256, len(base[::5]) * width, np.uint8).view(word)
            difference, planes = np.empty_like(words), np.empty((width, n), np.uint8)
            host.subtract(words, base, difference)
            if width == 1:
                planes[0] = difference
            else:
                host.split(difference, False, tuple(planes))
            there, parts = torch.from_numpy(base.view(np.uint8)).cuda(), [torch.from_numpy(plane).cuda() for plane in planes]
            rows.append([there.data_ptr(), n, *(part.data_ptr() for part in parts), *[0] * (kernel_args.COLUMNS - 2 - width)])
            kept.append((words.view(np.uint8), there, parts))
        table, sums = torch.tensor(rows).cuda(), torch.zeros(len(rows), dtype=torch.int64, device="cuda")
        word_kernels.add(table, 3_000_001 * width, width=width, digests=sums)
        for (words, there, _), total in zip(kept, sums.tolist(), strict=True):
            assert np.array_equal(there.cpu().numpy(), words), (width, words.size)
            assert finish(total, words.size) == raw_digest(words), (width, words.size)


@pytest.mark.parametrize("id", [1, 2, 3])
def test_a_chain_of_deltas_is_decoded_on_the_gpu(id: int, caplog: pytest.LogCaptureFixture) -> None:
    """The golden repository, against which every reader is tested: words of every width, and weights derived from a delta."""
    version = raystow.open(str(GOLDEN)).version(id)
    expected = json.loads((GOLDEN / "expected.json").read_text())[str(id)]
    into = {
        name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype), device="cuda") for name, info in version.tensors().items()
    }
    with caplog.at_level(logging.INFO):
        for names in (list(expected), ["weights"], ["weights", "few"]):
            some = {name: into[name].zero_() for name in names}
            raystow.restore(version, some, strict=False)
            assert {name: blake3.blake3(as_bytes(tensor)).hexdigest() for name, tensor in some.items()} == {
                name: expected[name] for name in names
            }
    assert "on the CPU" not in caplog.text


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def moved(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state whose words all change by 0 or 1; the weights are derived from the new master copy."""
    after = {}
    for name, tensor in state.items():
        words = tensor.clone().view(torch.int64 if tensor.itemsize == 16 else WORDS[tensor.itemsize])
        after[name] = words.add_(torch.randint(0, 2, words.shape).to(words.dtype)).view(tensor.dtype)
    if "weights" in after:
        after["weights"] = after["master"].bfloat16()
    return after


def begun() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {str(dtype): torch.arange(2_100_000 // dtype.itemsize).to(dtype).reshape(-1, 50) for dtype in DTYPES}
    state["master"] = torch.randn(3_000, 1_000) * 0.02
    return {**state, "weights": state["master"].bfloat16()}


@pytest.fixture(scope="module")
def row() -> tuple[LocalCluster, list[Version], list[dict[str, torch.Tensor]]]:
    """Save three versions of tensors on the CPU: one whole, two deltas to it."""
    states, versions = [begun()], list[Version]()
    cluster = LocalCluster("memory://differences-restored", delta=3, memory=512 << 20)
    with cluster:
        for step in range(3):
            versions.append(cluster.save(states[-1], step=step))
            states.append(moved(states[-1]))
    assert versions[2].record.bases == (1,)
    return cluster, versions, states


def test_deltas_are_restored_bit_for_bit(
    row: tuple[LocalCluster, list[Version], list[dict[str, torch.Tensor]]], caplog: pytest.LogCaptureFixture
) -> None:
    _, versions, states = row
    for version, state in zip(versions, states, strict=False):
        told = list[int]()
        into = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items()}
        with caplog.at_level(logging.INFO):
            raystow.restore(version, into, progress=told.append)
        assert {name: as_bytes(into[name]) == as_bytes(state[name]) for name in state} == dict.fromkeys(state, True)
        assert sum(told) == sum(tensor.nbytes for tensor in state.values())
    assert "on the CPU" not in caplog.text


def test_slices_and_derived_weights_are_decoded(row: tuple[LocalCluster, list[Version], list[dict[str, torch.Tensor]]]) -> None:
    """A restore on another number of ranks requests parts of chunks, which are decoded through memory of the lane."""
    from raystow.workers.gpu.decode.decoder import Decoder

    _, versions, states = row
    decoder = Decoder(torch.device("cuda", 0))
    try:
        for version, state in zip(versions, states, strict=False):
            for names in (["weights"], ["master", "weights"], ["torch.float64", "torch.uint8"]):
                requests, wanted = [], []
                for name in names:
                    box = (3, 7), (state[name].shape[0] - 100, state[name].shape[1] - 20)
                    target = torch.zeros(box[1], dtype=WORDS[state[name].itemsize], device="cuda")
                    requests.append(Request(name, version.chunks[name], box, target))
                    wanted.append(state[name][3 : 3 + box[1][0], 7 : 7 + box[1][1]])
                reader = version.reader()
                decoder.fill(reader.runs(requests), reader.read, lambda nbytes: None)
                for request, part in zip(requests, wanted, strict=True):
                    assert as_bytes(request.target) == as_bytes(part), (version.id, request.name)
    finally:
        decoder.close()


def test_a_damaged_base_names_the_base_and_its_delta(
    row: tuple[LocalCluster, list[Version], list[dict[str, torch.Tensor]]],
) -> None:
    _, versions, states = row
    name = "torch.int32"
    (first, *_) = versions[0].chunks[name]
    key = keys.pack(1, versions[0].attempt, first.node, first.group, first.pack)
    store = raystow.open("memory://differences-restored").store
    data = store.get(key, max_bytes=1 << 30)
    at = first.start + first.coding.size // 2
    store.put(key, [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]])
    try:
        into = {name: torch.zeros_like(states[2][name], device="cuda")}
        with pytest.raises(raystow.Damaged, match=rf"{name}'.*not match.*; '{name}' of version 3 is a delta to it") as raised:
            raystow.restore(versions[2], into, strict=False)
        assert key in str(raised.value)
    finally:
        store.put(key, [data])
