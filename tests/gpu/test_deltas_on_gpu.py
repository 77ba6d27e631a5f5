"""Differences to an earlier version, taken where the tensors are: kernels, rows of saves, and what happens to a damaged base."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from local_cluster import LocalCluster

import raystow
from raystow.orchestrator.restore import restore
from raystow.storage.clock import SYSTEM
from raystow.storage.coding import chunk, kernels
from raystow.storage.coding.digest import finish, raw_digest
from raystow.storage.format import keys
from raystow.storage.version import Version
from raystow.workers.memory.memory_tier import Home

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20
N = 5 * MIB + 3
State = dict[str, torch.Tensor]


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return np.array_equal(host(a), host(b))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_kernels_do_what_those_of_the_host_do(width: int) -> None:
    from raystow.workers.cuda import kernels as gpu
    from raystow.workers.cuda import tables

    word, rotate, held = kernels.WORDS[width], width > 1, list[Any]()
    sizes = [1, 17, 8192, 16_384 * 4 + 1, (2 * MIB + 5), 16 * MIB // width]
    rows, bases = (np.zeros((len(sizes), tables.COLUMNS), np.int64) for _ in range(2))
    for i, n in enumerate(sizes):
        base = torch.randint(0, 256, (n * width,), dtype=torch.uint8, device="cuda")
        near = host(base).view(word) + np.random.default_rng(i).integers(0, 300, n).astype(word)
        now = base if i == 2 else torch.from_numpy(near.view(np.uint8)).cuda()
        planes = [np.empty(n, np.uint8) for _ in range(width)]
        if width > 1:
            kernels.split(host(base).view(word), rotate, tuple(planes))
        else:
            planes = [host(base)]
        before = [torch.from_numpy(np.append(np.zeros(p, np.uint8), plane)).cuda()[p:] for p, plane in enumerate(planes)]
        after = [torch.zeros(n, dtype=torch.uint8, device="cuda") for _ in range(width)]
        rows[i, : 2 + width] = now.data_ptr(), n, *(plane.data_ptr() for plane in after)
        bases[i, 1 : 2 + width] = n, *(plane.data_ptr() for plane in before)
        held.append((base, now, before, after))
    table, results = torch.from_numpy(rows).cuda(), torch.zeros((4, len(sizes)), dtype=torch.int64, device="cuda")
    samples = torch.zeros(len(sizes), dtype=torch.int64, device="cuda")
    most = max(sizes) * width
    gpu.split(table, most, width=width, rotate=rotate, packed=False, results=results, bases=torch.from_numpy(bases).cuda())
    gpu.sample(table, most, width=width, packed=False, samples=samples)
    assert torch.equal(results[1], samples)
    for i, (base, now, _, after) in enumerate(held):
        difference = np.empty(sizes[i], word)
        kernels.subtract(host(now).view(word), host(base).view(word), difference)
        for p, plane in enumerate(after):
            assert np.array_equal(host(plane), difference.view(np.uint8)[p::width]), f"plane {p} of {sizes[i]} words"
        assert finish(int(results[0, i]), now.numel()) == raw_digest(host(now)), f"digest of {sizes[i]} words"
        assert finish(int(results[3, i]), base.numel()) == raw_digest(host(base)), f"digest of a base of {sizes[i]} words"
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    picked = torch.zeros((4, gpu.SAMPLED), dtype=integers, device="cuda")
    gpu.pick(table[2:], picked)
    for i, words in enumerate(picked, 2):
        assert np.array_equal(host(words).view(word), chunk.sample(host(held[i][1]).view(word))), f"sample of {sizes[i]} words"


def training(*, in_place: bool = True) -> Iterator[State]:
    """A state after each of some steps, as Adam makes them, and what is odd: sizes, NaNs with payloads, a view, integers."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, device="cuda")

    nan = torch.randint(-(2**31), 2**31, (MIB + 1,), generator=generator, device="cuda").to(torch.int32)
    master, first = normal(N), 1e-3 * normal(N)
    state = {
        "model.w": master.bfloat16(),
        "optim.master": master,
        "optim.exp_avg": first,
        "optim.exp_avg_sq": first.square() + 1e-10,
        "optim.step": torch.zeros((), device="cuda"),
        "bf16": (master[: 3 * MIB + 1] + 1).bfloat16(),
        "double": master[:MIB].double(),
        "fp8": (master[: 2 * MIB + 1] * 8).to(torch.float8_e4m3fn),
        "nan": nan.view(torch.float32),
        "view": master[: 4 * MIB].view(1024, -1)[:, 3:-5],
        "frozen": normal(2 * MIB),
        "ints": torch.arange(MIB, device="cuda"),
        "small": normal(7),
    }
    while True:
        yield state if in_place else {name: tensor.clone() for name, tensor in state.items()}
        gradient = 1e-3 * normal(N)
        state["optim.exp_avg"].mul_(0.9).add_(0.1 * gradient)
        state["optim.exp_avg_sq"].mul_(0.999).add_(0.001 * gradient.square())
        master.sub_(1e-5 * state["optim.exp_avg"] / (state["optim.exp_avg_sq"].sqrt() + 1e-8))
        state["model.w"].copy_(master)
        state["bf16"].copy_(master[: 3 * MIB + 1] + 1)
        state["double"].copy_(master[:MIB])
        state["fp8"].copy_((master[: 2 * MIB + 1] * 8).to(torch.float8_e4m3fn))
        state["nan"].view(torch.int32).add_(1)
        state["optim.step"].add_(1)
        state["ints"].add_(1)


def cluster_of(**more: Any) -> LocalCluster:
    return LocalCluster(f"memory://gpu-deltas-{SYSTEM.token()}", **{"memory": 256 * MIB, "codec": "deflate", "delta": 3, **more})


def bases(version: Version) -> dict[str, set[int | None]]:
    return {name: {one.coding.base for one in chunks} for name, chunks in version.chunks.items()}


def size(version: Version, name: str) -> float:
    return sum(one.coding.size for one in version.chunks[name]) / sum(one.decoded for one in version.chunks[name])


def check(version: Version, state: State, where: str) -> None:
    into = {name: torch.zeros_like(tensor, device=where) for name, tensor in state.items()}
    restore(version, into)
    wrong = [name for name, tensor in state.items() if not same(into[name], tensor)]
    assert not wrong, f"version {version.id}, restored to {where}"


@pytest.mark.parametrize(("codec", "in_place"), [("deflate", True), ("zstd", False)], ids=["in place", "elsewhere in every save"])
def test_rows_of_saves_are_smaller_and_come_back_bit_for_bit(codec: str, in_place: bool) -> None:
    with cluster_of(codec=codec) as cluster:
        kept = list[tuple[Version, State]]()
        for step, state in enumerate(itertools.islice(training(in_place=in_place), 6)):
            kept.append((cluster.save(state, step=step), {name: tensor.cpu() for name, tensor in state.items()}))
        print({name: round(size(kept[1][0], name), 3) for name in kept[0][1]})
        assert [entry.bases for entry in cluster.repository.root().versions] == [(), (1,), (1,), (1,), (), (5,)]
        for version, state in kept:
            for where in ("cpu", "cuda"):
                check(version, state, where)
            cluster.repository.verify(version)
        whole, first, third = kept[0][0], kept[1][0], kept[3][0]
        found = bases(first)
        for name in ("optim.master", "optim.exp_avg_sq", "bf16", "double", "nan", "frozen", "model.w"):
            assert found[name] == {1}, name
        assert {base for version, _ in kept for base in bases(version)["small"]} == {None}
        assert size(first, "optim.master") < 0.8 * size(whole, "optim.master")
        assert size(first, "frozen") < (0.01 if codec == "deflate" else 0.15)
        assert first.bytes < third.bytes < 0.9 * whole.bytes


def test_a_training_that_waits_is_not_kept_waiting_for_differences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with ``delta="auto"``: from the moment on at which somebody waits, what has not been read is stored whole."""
    from raystow.workers.cuda.encoding import differences
    from raystow.workers.cuda.encoding.encoder import Encoder

    waits, brought, after = threading.Event(), list[int](), [1 << 30]
    encode, bring = Encoder.encode, Encoder._bring

    def hurried(self: Any, *args: Any, **more: Any) -> None:
        encode(self, *args, **{**more, "patient": False, "urgent": waits.is_set})

    def counted(self: Any, number: int, stream: Any) -> torch.Tensor:
        brought.append(number)
        if len(brought) == after[0]:
            waits.set()
        return bring(self, number, stream)

    monkeypatch.setattr(Encoder, "encode", hurried)
    monkeypatch.setattr(Encoder, "_bring", counted)
    monkeypatch.setattr(differences, "_TURN", 8 * MIB)
    kept, shares = list[tuple[Version, State]](), list[float]()
    with cluster_of(delta=8) as cluster, caplog.at_level(logging.INFO, "raystow"):
        for step, state in enumerate(itertools.islice(training(), 8)):
            after[0] = {3: 2, 6: 1}.get(step, 1 << 30)
            waits.set() if step == 5 else waits.clear()
            brought.clear()
            kept.append((cluster.save(state, step=step), {name: tensor.cpu() for name, tensor in state.items()}))
            chunks = [one for name, some in kept[-1][0].chunks.items() for one in some if name != "ints"]  # the node codes those
            shares.append(sum(one.decoded for one in chunks if one.coding.base) / sum(one.decoded for one in chunks))
        print(shares, [entry.bases for entry in cluster.repository.root().versions])
        assert shares[0] == shares[1] == shares[5] == 0 < shares[6] <= shares[3] < shares[2] == shares[4] == shares[7], shares
        assert [text for text in caplog.messages if "no device memory was set aside for that" in text]
        assert [text for text in caplog.messages if "the training waits" in text]
        for version, state in kept:
            for where in ("cpu", "cuda"):
                check(version, state, where)
            cluster.repository.verify(version, deep=True)


def test_left_to_itself_it_begins_when_it_is_known_to_pay_and_goes_on() -> None:
    with cluster_of(delta="auto") as cluster:
        kept = list[tuple[Version, State]]()
        for step, state in enumerate(itertools.islice(training(), 5)):
            del state["ints"]  # the node codes those
            kept.append((cluster.save(state, step=step), {name: tensor.cpu() for name, tensor in state.items()}))
            state["ints"] = torch.arange(MIB, device="cuda")
        found = [entry.bases for entry in cluster.repository.root().versions]
        assert found == [(), (), (2,), (2,), (2,)], "the second one shows that it pays"
        for version, state in kept:
            check(version, state, "cuda")


def test_what_is_not_in_memory_is_no_base(caplog: pytest.LogCaptureFixture) -> None:
    with cluster_of() as cluster, caplog.at_level(logging.INFO, "raystow"):
        states = training()
        cluster.save(next(states), step=0)
        cluster.restart_node(0)
        version = cluster.save(state := next(states), step=1)
        assert set().union(*bases(version).values()) == {None}
        assert [text for text in caplog.messages if "stored whole" in text]
        check(version, state, "cuda")
        version = cluster.save(state := next(states), step=2)
        assert bases(version)["optim.master"] == {2}
        check(version, state, "cuda")


def unfolded(cluster: LocalCluster, id: int) -> None:
    """Wait until the node has decoded the planes of a version."""
    until = SYSTEM.monotonic() + 60
    while not any(held.planes for held in cluster.tier(0).holdings(cluster.repository.id) if held.home.id == id):
        assert SYSTEM.monotonic() < until, f"the planes of version {id} are not decoded"
        threading.Event().wait(0.01)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many streams each call of nvCOMP's decoders was given."""
    from raystow.workers.cuda.nvcomp import Codec

    calls, decompress = list[int](), Codec.decompress

    def counted(self: Any, *table: Any, **more: Any) -> None:
        calls.append(len(table[0]))
        decompress(self, *table, **more)

    monkeypatch.setattr(Codec, "decompress", counted)
    return calls


def test_no_save_decodes_on_the_gpu_what_the_node_has_decoded(decoded: list[int]) -> None:
    with cluster_of(delta=3) as cluster:
        states, kept = training(), list[tuple[Version, State]]()
        for step in range(6):
            state = next(states)
            kept.append((cluster.save(state, step=step), {name: tensor.cpu() for name, tensor in state.items()}))
            if step in (0, 4):
                unfolded(cluster, step + 1)
        assert [entry.bases for entry in cluster.repository.root().versions] == [(), (1,), (1,), (1,), (), (5,)]
        assert decoded == []
        for version, state in kept:
            check(version, state, "cpu")


def test_planes_that_are_not_decoded_yet_or_had_to_go_are_decoded_on_the_gpu(
    decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raystow.workers.memory import former

    may, unfold_all = threading.Event(), former.unfold_all

    def late(*args: Any, **more: Any) -> Any:
        assert may.wait(60)
        return unfold_all(*args, **more)

    monkeypatch.setattr(former, "unfold_all", late)
    with cluster_of(delta=9) as cluster:
        states, tier, kept = training(), cluster.tier(0), list[tuple[Version, State]]()

        def save() -> int:
            """How often something was decoded meanwhile."""
            before, state = len(decoded), next(states)
            version = cluster.save(state, step=len(kept))
            kept.append((version, {name: tensor.cpu() for name, tensor in state.items()}))
            return len(decoded) - before

        assert save() == 0, "it is whole"
        assert save() > 0, "they are not decoded yet"
        may.set()
        unfolded(cluster, 1)
        assert [save(), save()] == [0, 0]
        tier.resize(tier.used - 1)
        assert not any(held.planes for held in tier.holdings(cluster.repository.id))
        assert save() > 0, "they had to go"
        assert [bases(version)["optim.master"] for version, _ in kept] == [{None}, *[{1}] * 4]
        for version, state in kept:
            check(version, state, "cpu")


def test_planes_for_which_there_is_no_room_are_decoded_on_the_gpu(decoded: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with cluster_of(delta=9) as cluster:
        cluster.save({"another": torch.zeros(10)}, step=0)
        states = training()
        state = next(states)
        cluster.tier(0).resize(int(0.8 * sum(tensor.nbytes for tensor in state.values())))
        cluster.save(state, step=1)
        version = cluster.save(state := next(states), step=2)
        assert bases(version)["optim.master"] == {2}
        assert decoded
        assert "GPUs decode planes of version 2 in every save that differs from it" in caplog.text
        check(version, state, "cuda")


@pytest.mark.parametrize("where", ["as it is stored", "decoded"])
@pytest.mark.parametrize("after", [1, 2], ids=["before it was looked at", "after that"])
def test_a_save_fails_whose_base_is_damaged_and_the_next_is_whole(after: int, where: str) -> None:
    with cluster_of(delta=9) as cluster:
        states = training()
        for step in range(after):
            cluster.save(next(states), step=step)
        unfolded(cluster, 1)
        base = cluster.repository.version(1)
        place = base.chunks["optim.master"][0]  # which begins with planes that are noise, and stored as they are
        key = keys.pack(base.id, base.record.attempt, place.node, place.group, place.pack)
        tier, home = cluster.tier(0), Home(cluster.repository.id, base.id, base.record.attempt)
        descriptor = tier.loan_planes(home).descriptor if where == "decoded" else tier.borrow(cluster.repository.id, key)
        at = 5000 if where == "decoded" else place.start + 5000
        garbage = bytes(byte ^ 0x55 for byte in os.pread(descriptor, 4096, at))
        os.pwrite(descriptor, garbage, at)
        os.close(descriptor)
        with pytest.raises(raystow.SaveFailed, match=r": .* difference to version 1, which is damaged"):
            cluster.save(next(states), step=8)
        version = cluster.save(state := next(states), step=9)
        assert {base for name, found in bases(version).items() if name != "ints" for base in found} == {None}
        check(version, state, "cuda")


def test_device_memory_is_bounded_and_given_back() -> None:
    state = {f"layer{i}": torch.randn(64 * MIB, device="cuda") for i in range(6)}
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with cluster_of(memory=4 << 30, delta=9) as cluster:
        for step in range(4):
            version = cluster.save(state, step=step)
            for tensor in state.values():
                tensor.mul_(1 + 1e-5)
            torch.cuda.synchronize()
        assert bases(version)["layer0"] == {1}
        assert torch.cuda.max_memory_allocated() - before <= 1536 * MIB
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 16 * MIB
