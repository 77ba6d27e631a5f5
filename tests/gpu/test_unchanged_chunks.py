"""Unchanged tensors on a GPU are stored once and are not encoded or copied again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.colliding_tensors import colliding_tensors
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.coding.digest import SecretKeys, digest_pair, finish
from raystow.storage.retention.policy import Policy
from raystow.storage.versions.version import Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20
State = dict[str, torch.Tensor]


def lora(step: int, frozen: State) -> State:
    adapter = torch.randn(40_000, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
    return {**frozen, "adapter": adapter, "step": torch.tensor(step)}


def frozen_model() -> State:
    generator = torch.Generator("cuda").manual_seed(0)
    master = torch.randn(9 * MIB, generator=generator, device="cuda") * 0.02
    bits = torch.randint(-(1 << 31), 1 << 31, (MIB,), generator=generator, device="cuda").to(torch.int32)
    of = {"master": master, "weights": master.bfloat16(), "any bits": bits.view(torch.float32)}
    return {**of, "double": torch.randn(MIB, dtype=torch.float64, generator=generator, device="cuda")}


def references(version: Version) -> set[str]:
    return {name for name, rows in version.chunks.items() if all(row.is_reference for row in rows)}


def check(cluster: LocalCluster, version: Version, state: State) -> None:
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    raystow.restore_latest(cluster.uri, into=into)
    for name, value in state.items():
        assert torch.equal(into[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    cluster.repository.verify(version)


@pytest.mark.parametrize("codec", ["deflate", "zstd", "raw", "cpu"])
def test_frozen_tensors_are_stored_once(tmp_path: Path, codec: str) -> None:
    frozen = frozen_model()
    with LocalCluster(str(tmp_path), codec=codec, delta="auto", memory=256 * MIB) as cluster:
        first = cluster.save(lora(0, frozen), step=0)
        for step in range(1, 5):
            version = cluster.save(state := lora(step, frozen), step=step)
            assert references(version) >= {"master", "any bits", "double"}
            assert version.bytes < 0.02 * first.bytes
            assert version.entry.bases == (1,)
        check(cluster, version, state)
        cluster.repository.plan_retention(Policy(keep_last=1)).execute()
        cluster.repository.plan_collection(grace=0).execute()
        check(cluster, cluster.repository.latest(), state)


@pytest.mark.parametrize("codec", ["deflate", "raw", "cpu"])
def test_tensors_of_colliding_public_digests_are_stored(tmp_path: Path, codec: str) -> None:
    """Also from the third save on, in which the training process compares chunks itself."""
    one, other = (torch.from_numpy(value).cuda() for value in colliding_tensors())
    frozen = torch.randn(MIB, device="cuda")
    with LocalCluster(str(tmp_path), codec=codec, delta="auto", memory=256 * MIB) as cluster:
        for step, value in enumerate((one, other, other, other, one, one, other)):
            state = {"w": value, "half": value.view(torch.bfloat16), "frozen": frozen}
            version = cluster.save(state, step=step)
            check(cluster, version, state)
            assert references(version) >= ({"frozen"} if step else set())
            assert ("w" in references(version)) == (step in (4, 5)), "all versions are compared with the first one"


def test_unchanged_chunks_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training process skips them from the third save on; in the second save the node worker detects them."""
    from raystow.workers.gpu.encode.encode_run import Emit
    from raystow.workers.gpu.encode.encoder import Encoder
    from raystow.workers.gpu.encode_request import EncodeRequest

    coded, encode = list[int](), Encoder.encode

    def counted(self: Encoder, request: EncodeRequest, emit: Emit) -> None:
        coded.append(sum(source.nbytes for source in request.pieces))
        encode(self, request, emit)

    monkeypatch.setattr(Encoder, "encode", counted)
    frozen = frozen_model()
    with LocalCluster(str(tmp_path), codec="deflate", delta="auto", memory=256 * MIB) as cluster:
        for step in range(5):
            cluster.save(lora(step, frozen), step=step)
    assert coded[1] > 40 * MIB
    assert all(nbytes < MIB for nbytes in coded[3:])


def test_tensors_that_change_at_times_are_restored_exactly(tmp_path: Path) -> None:
    frozen = frozen_model()
    with LocalCluster(str(tmp_path), codec="deflate", delta="auto", memory=256 * MIB) as cluster:
        for step in range(9):
            if step in (3, 4):
                frozen["master"].mul_(1.01)
                frozen["weights"] = frozen["master"].bfloat16()
            if step == 6:
                frozen["any bits"].view(torch.int32)[12_345] ^= 1
            version = cluster.save(state := lora(step, frozen), step=step)
            check(cluster, version, state)
        assert {"any bits", "double"} - references(version) <= {"any bits"}


def test_always_changing_tensors_are_compared_in_two_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raystow.workers.gpu import unchanged

    taken, take = list[int](), unchanged.Digests.take

    def counted(self: unchanged.Digests) -> torch.Tensor:
        taken.append(self._count)
        return take(self)

    monkeypatch.setattr(unchanged.Digests, "take", counted)
    with LocalCluster(str(tmp_path), codec="deflate", delta="auto", memory=256 * MIB) as cluster:
        for step in range(5):
            cluster.save({"w": torch.randn(4 * MIB, device="cuda")}, step=step)
    assert len(taken) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("n", [4, 28, 4096, 100_004, 4 * MIB])
def test_the_gpu_and_the_cpu_compute_the_same_digests(dtype: torch.dtype, n: int) -> None:
    from raystow.workers.gpu import kernel_args
    from raystow.workers.gpu.kernels import word_kernels

    raw = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    row = torch.zeros((1, kernel_args.COLUMNS), dtype=torch.int64)
    row[0, 0], row[0, 1] = raw.data_ptr(), n
    packed = kernel_args.can_pack(row.numpy(), dtype.itemsize)
    for keys in (SecretKeys(bytes(range(32))), SecretKeys(bytes(32))):
        sums = torch.zeros((3, 1), dtype=torch.int64, device="cuda")
        word_kernels.digest(row.cuda(), raw.nbytes, width=dtype.itemsize, packed=packed, digests=sums, keys=keys)
        first, low, high = (int(finish(total & ((1 << 64) - 1), raw.nbytes)) for total in sums.flatten().tolist())
        assert (first, low | high << 64) == digest_pair(raw.cpu().numpy(), keys)
