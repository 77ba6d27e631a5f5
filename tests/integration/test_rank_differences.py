"""Ranks that hold other bits of the same tensor: each save names rank, tensor and element."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from helpers.local_cluster import LocalCluster

import raystow
from integration.cli_runner import ran, run_json
from integration.ranks import Rank, every, start
from raystow.storage.format.replica_difference import ReplicaDifference

State = dict[str, Any]


def plain_state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(600, 700, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()},
        "array": np.arange(40, dtype=np.int16).reshape(4, 10),
        "bn.running_mean": torch.zeros(3),
        "step": 5,
    }


def found(version: raystow.Version) -> dict[str, ReplicaDifference]:
    return {one.name: one for one in version.record.differences}


def test_a_flipped_bit_is_named_with_both_sides(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path), nodes=2) as cluster:
        states = [plain_state() for _ in range(3)]
        assert cluster.save_all(states, step=1).record.differences == ()
        assert not caplog.records
        states[1]["model"]["w"].view(torch.int32)[411, 17] ^= 1 << 20
        states[2]["array"][3, 9] = -1
        version = cluster.save_all(states, step=2)
    differences = found(version)
    assert differences["model.w"] == ReplicaDifference(
        "model.w", "tensor", (1,), (0, 2), 1, 2, "minority", (411, 17), within=1, elements=1
    )
    array = differences["array"]
    assert (array.odd, array.others, array.stored, array.first, array.elements) == ((2,), (0, 1), "majority", (3, 9), 1)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "rank 1 and ranks 0, 2 differ in model.w, element [411, 17] alone" in warning
    assert "raystow.PerRank" in warning
    assert "broadcast" in warning
    assert "corrupted device" in warning


def test_commands_show_what_ranks_held_differently(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as cluster:
        states = [plain_state(), plain_state()]
        cluster.save_all(states, step=1)
        states[1]["model"] = plain_state(seed=1)["model"]
        version = cluster.save_all(states, step=2)
    sides = "rank 1 and rank 0" if found(version)["model.w"].odd == (1,) else "rank 0 and rank 1"
    shown = ran("diff", "--ranks", f"{tmp_path}@latest", columns=300).stdout
    assert f"{sides} differ in model.w, from element [0, 0] on; without a majority" in shown
    assert f"{sides} differ in model.w" in ran("show", tmp_path, columns=300).stdout
    assert [one["name"] for one in run_json("show", tmp_path)["differences"]] == ["model.b", "model.w"]
    assert run_json("diff", "--ranks", tmp_path, 1)["differences"] == []
    assert run_json("diff", "--ranks", tmp_path, 2, "--exit-code", code=7)["different"]
    page = tmp_path / "report.html"
    reported = run_json("report", tmp_path, "-o", page)["versions"]
    assert [len(one["differences"]) for one in reported] == [0, 2]
    assert "differ in model.w, from element [0, 0] on" in page.read_text()
    ran("diff", tmp_path, code=2)


def test_a_difference_fails_the_save_if_asked(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path), on_difference="raise") as cluster:
        states = [plain_state() for _ in range(3)]
        states[2]["bn.running_mean"][1] = 1
        states[0]["step"] = 6
        assert [one.kind for one in cluster.save_all(states, step=1).record.differences] == ["buffer", "value"]
        states[2]["model"]["b"][0] += 1
        with pytest.raises(raystow.SaveFailed, match=r"rank 2 and ranks 0-1 differ in model\.b, element \[0\] alone"):
            cluster.save_all(states, step=2)
        assert len(raystow.open(tmp_path).versions()) == 1


def test_tensors_that_may_differ_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Statistics of a batch norm, in a module and as plain tensors, and plain values."""
    models = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with LocalCluster("memory://by-design") as cluster:
        for step in (1, 2):
            for rank, model in enumerate(models):
                model[1].running_var.fill_(rank + step)
            states = [{**plain_state(), "model": model, "step": rank} for rank, model in enumerate(models)]
            version = cluster.save_all(states, step=step)
            assert {(one.name, one.kind) for one in version.record.differences} == {
                ("model.1.running_var", "buffer"),
                ("step", "value"),
            }
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "reported once" in warning


def test_a_copy_on_one_rank_alone_is_named() -> None:
    """A rank stores one of two tensors if the other follows from it, and no other rank holds them."""
    masters = {str(i): torch.randn(4_000_000, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    states: list[State] = [
        {"master": masters, "weights": {name: one.bfloat16() for name, one in masters.items()}} for _ in range(2)
    ]
    states[1]["weights"]["1"] = torch.ones(4_000_000).bfloat16()
    with LocalCluster("memory://copy") as cluster:
        assert {*found(cluster.save_all(states, step=1))} == {"weights.1"}
        states[1]["weights"]["1"] = masters["1"].bfloat16()
        assert cluster.save_all(states, step=2).record.differences == ()


def test_a_tie_that_one_rank_has_broken_is_named() -> None:
    """Tied tensors are stored once, so all ranks must have tied the same."""
    tied = torch.randn(300, 400)
    states: list[State] = [{"embedding": tied, "head": tied}, {"embedding": tied, "head": tied.clone()}]
    match = r"rank 1 has head float32 \[300, 400\]; rank 0 has head float32 \[300, 400\] tied to embedding"
    with LocalCluster("memory://tie") as cluster:
        with pytest.raises(raystow.SaveFailed, match=match):
            cluster.save_all(states, step=1)
        states[1]["head"] = states[1]["embedding"]
        assert cluster.save_all(states, step=2).record.differences == ()


def test_hundreds_of_differing_tensors_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster("memory://many") as cluster:
        states = [{f"t{i:03}": torch.full((3,), float(rank)) for i in range(200)} for rank in range(2)]
        version = cluster.save_all(states, step=1)
    assert [one.name for one in version.record.differences] == [f"t{i:03}" for i in range(32)]
    assert "and 29 more: t003, t004" in caplog.text


DISAGREEMENTS = {
    "presence": ({"lr": 0.1}, {}, {"lr"}),
    "container": ({"betas": (0.9, 0.99)}, {"betas": [0.9, 0.99]}, {"betas.0", "betas.1"}),
    "tensor's container": ({"t": [torch.ones(2)]}, {"t": (torch.ones(2),)}, {"t.0"}),
    "tensor and array": ({"t": torch.ones(2)}, {"t": np.ones(2, np.float32)}, {"t"}),
    "int and float": ({"n": 5}, {"n": 5.0}, {"n"}),
    "bool and int": ({"n": True}, {"n": 1}, {"n"}),
    "None and text": ({"n": None}, {"n": "None"}, {"n"}),
    "value and dict": ({"n": 3}, {"n": {"a": 3}}, {"n", "n.a"}),
    "keys": ({"n": {1: 2}}, {"n": {"1": 2}}, {"n.1"}),
    "PerRank": ({"n": raystow.PerRank(3)}, {"n": 3}, {"n"}),
}


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_other_values_are_named(first: int, caplog: pytest.LogCaptureFixture) -> None:
    """Presence, types and containers: each save says that the ranks disagree on this value, and no other."""
    with LocalCluster("memory://values") as cluster:
        for step, (what, (*parts, names)) in enumerate(DISAGREEMENTS.items(), start=1):
            states = [{**plain_state(), **parts[first]}, {**plain_state(), **parts[1 - first]}, {**plain_state(), **parts[first]}]
            differences = found(cluster.save_all(states, step=step))
            assert {*differences} == names, what
            assert all((one.kind, one.odd, one.others) == ("value", (1,), (0, 2)) for one in differences.values()), what
            assert all(name in caplog.text for name in names), what
        assert cluster.save_all([plain_state() for _ in range(3)], step=99).record.differences == ()


def test_a_name_is_found_among_thousands(caplog: pytest.LogCaptureFixture) -> None:
    """And values of a list that grows, and of steps, are reported once."""
    with LocalCluster("memory://thousands") as cluster:
        for step in (1, 2, 3):
            states = [{"values": {f"layer{i}": i for i in range(9000)}, "losses": [rank] * step} for rank in range(2)]
            states[1]["only"] = {f"step{step}": 3}
            names = {f"only.step{step}", *(f"losses.{i}" for i in range(step))}
            assert {*found(cluster.save_all(states, step=step))} == names
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "only.step1" in warning


def box(rows: int, place: int, dtype: torch.dtype = torch.float32) -> raystow.Box:
    return raystow.Box(torch.ones(2, 4, dtype=dtype), (rows, 4), (2 * place, 0))


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([{"t": torch.ones(3)}, {"t": torch.ones(4)}], r"ranks \[1\] hold other plain tensors .*rank 1 has t float32 \[4\]"),
        ([{"t": torch.ones(3)}, {"t": torch.ones(3).half()}], r"ranks \[1\] .*rank 1 has t float16 \[3\]; rank 0 has t float32"),
        ([{"t": torch.ones(0, 3)}, {"t": torch.ones(0, 4)}], r"ranks \[1\] .*rank 1 has t float32 \[0, 4\]"),
        ([{"t": torch.ones(0)}, {}], r"ranks \[1\] .*rank 0 has t float32 \[0\]"),
        ([{"t": torch.ones(3)}, {}], r"ranks \[1\] .*rank 0 has t float32 \[3\]"),
        ([{"t": torch.ones(3)}, {"t": 3}], r"ranks \[1\] .*rank 0 has t float32 \[3\]"),
        ([{"t": torch.ones(3)}, {"t": raystow.PerRank(torch.ones(3))}], r"ranks \[1\] .*rank 0 has t float32 \[3\]"),
        (
            [{"t": box(4, 0)}, {"t": box(4, 1, torch.float16)}],
            r"whole tensor 't': for rank 1 it is float16 \[4, 4\]; for rank 0 it is float32",
        ),
        (
            [{"t": box(8, 0)}, {"t": box(6, 1)}, {"t": box(8, 2)}, {"t": box(8, 3)}],
            r"whole tensor 't': for rank 1 it is float32 \[6, 4\]; for ranks 0, 2-3 it is float32 \[8, 4\].*correct",
        ),
        ([{"t": box(4, 0)}, {}], r"whole tensor 't', float32 \[4, 4\]: rank 0 stores \[0:2, 0:4\]; no rank stores the others"),
        (
            [{name: box(6, rank) for name in "tuv"} for rank in (0, 1, 1)],
            r"whole tensor '[tuv]', float32 \[6, 4\]: ranks 1-2 both store \[2:4, 0:4\]",
        ),
    ],
)
def test_ranks_with_other_tensors_fail_the_save(parts: list[State], match: str) -> None:
    with LocalCluster("memory://tensors") as cluster, pytest.raises(raystow.SaveFailed, match=match):
        cluster.save_all(parts, step=1)


def join_group(self: Rank, port: int) -> None:
    import torch.distributed as dist

    who = {"rank": self.checkpointer.rank, "world_size": self.checkpointer.world_size}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **who)


def distribute(self: Rank) -> None:
    """Set the state to a plain tensor, a replicated DTensor, and one sharded in two replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(401 * 515, dtype=torch.float32).reshape(401, 515)
    self.state = {
        "plain": whole.clone(),
        "everywhere": distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
        "hybrid": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
    }


def flip(self: Rank, name: str) -> None:
    tensor = self.state[name]
    local = getattr(tensor, "_local_tensor", tensor)
    local.view(torch.int32)[5, 3] ^= 1


def warnings_of(self: Rank) -> tuple[str, ...]:
    return self.pending[-1].warnings


@pytest.mark.usefixtures("cluster")
def test_rank_0_is_warned_of_a_difference_on_ray(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    every(ranks, "set", plain_state)
    ray.get(ranks[1].do.remote(lambda self: self.state["model"]["b"].zero_()))
    every(ranks, "save", 1)
    first, second = every(ranks, "do", lambda self: (self.pending[-1].result(60), self.pending.pop().warnings)[1])
    assert any("rank 1 and rank 0 differ in model.b, from element [0] on" in warning for warning in first)
    assert second == ()


def master_state(rank: int, boxed: bool) -> State:
    """Rounded weights of which rank 1 has one that is not rounded from its master copy. ``boxed``: as shards of hybrid shards,
    of which each of two pairs of ranks holds one."""
    half = rank // 2 if boxed else 0
    master = {str(i): torch.randn(100_000, generator=torch.Generator().manual_seed(i + 2 * half)) for i in range(2)}
    weights = {name: one.bfloat16() for name, one in master.items()}
    if rank == 1:
        weights["1"] = torch.ones(100_000).bfloat16()
    state = {"master": master, "weights": weights}
    if not boxed:
        return state
    place = (200_000,), (100_000 * half,), (2 * half, 2 * half + 1)
    return {key: {name: raystow.Box(one, *place) for name, one in of.items()} for key, of in state.items()}


@pytest.mark.parametrize("boxed", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("cluster")
def test_a_copy_on_one_rank_alone_is_warned_of(tmp_path: Path, boxed: bool) -> None:
    ranks = start(str(tmp_path), 4 if boxed else 2)
    ray.get([rank.set.remote(master_state, number, boxed) for number, rank in enumerate(ranks)])
    for step in (1, 2):
        every(ranks, "save", step)
        first, second, *_ = every(ranks, "do", lambda self: (self.pending[-1].result(60), self.pending.pop().warnings)[1])
        assert any("differ in weights.1, from element [0] on" in warning for warning in first)
        assert not any("differ" in warning for warning in second)
    assert raystow.open(tmp_path).latest().record.differences[0].name == "weights.1"


class Spoiler:
    """An object whose load changes a tensor on one rank, as a bug of the training might after a restore."""

    def __init__(self, tensor: torch.Tensor, spoils: bool) -> None:
        self.tensor, self.spoils = tensor, spoils

    def state_dict(self) -> State:
        return {"n": 1}

    def load_state_dict(self, state: State) -> None:
        if self.spoils:
            self.tensor[300_000] += 1


def spoiled_state(rank: int, spoils: bool) -> State:
    tensor = torch.ones(500_000)
    return {"w": tensor, "small": torch.zeros(3), "object": Spoiler(tensor, spoils and rank == 1)}


class Unrounded:
    """An object whose load replaces the rounded weights of one rank, which follow from their master copy on the others."""

    def __init__(self, weights: torch.Tensor, spoils: bool) -> None:
        self.weights, self.spoils = weights, spoils

    def state_dict(self) -> State:
        return {"n": 1}

    def load_state_dict(self, state: State) -> None:
        if self.spoils:
            self.weights[:] = 1


def unrounded_state(rank: int, spoils: bool) -> State:
    state = master_state(0, False)
    return {**state, "object": Unrounded(state["weights"]["1"], spoils and rank == 1)}


def restore_verified(self: Rank, spoils: bool, state: Callable[[int, bool], State] = spoiled_state) -> str:
    self.state = state(self.checkpointer.rank, spoils)
    try:
        self.checkpointer.restore(self.state, verify_replicas=True)
    except raystow.Damaged as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("cluster")
def test_a_restore_can_compare_what_ranks_hold(tmp_path: Path) -> None:
    """The next save finds a rank that has changed a restored tensor, too."""
    ranks = start(str(tmp_path), 2)
    ray.get([rank.set.remote(spoiled_state, number, False) for number, rank in enumerate(ranks)])
    every(ranks, "save", 1)
    every(ranks, "result")
    assert every(ranks, "do", restore_verified, False) == ["", ""]
    for text in every(ranks, "do", restore_verified, True):
        assert "differ in w, element [300000] alone" in text
    every(ranks, "save", 2)
    every(ranks, "result")
    (difference,) = raystow.open(tmp_path).versions()[-1].record.differences
    assert (difference.name, difference.first) == ("w", (300_000,))


@pytest.mark.usefixtures("cluster")
def test_a_restore_compares_what_some_ranks_could_derive(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    ray.get([rank.set.remote(unrounded_state, number, False) for number, rank in enumerate(ranks)])
    every(ranks, "save", 1)
    every(ranks, "result")
    for text in every(ranks, "do", restore_verified, True, unrounded_state):
        assert "differ in weights.1, from element [0] on" in text


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_flipped_bits_of_dtensors_are_found_on_ray(tmp_path: Path) -> None:
    """A plain tensor, ``Replicate`` and hybrid shards of four processes, each of which has a flipped bit in turn."""
    ranks = start(str(tmp_path), 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every(ranks, "do", join_group, port)
    every(ranks, "do", distribute)
    every(ranks, "save", 1)
    every(ranks, "fence")
    assert ray.get(ranks[0].do.remote(warnings_of)) == ()
    every(ranks, "result")
    for step, (name, odd) in enumerate([("plain", 2), ("everywhere", 3), ("hybrid", 3)], start=2):
        every(ranks, "do", distribute)
        ray.get(ranks[odd].do.remote(flip, name))
        every(ranks, "save", step)
        version = every(ranks, "do", lambda self: (self.pending[-1].result(60), self.pending.pop().warnings))
        record = raystow.open(tmp_path).versions()[-1].record
        (difference,) = record.differences
        first = (5 + (201 if name == "hybrid" else 0), 3)
        assert (difference.name, difference.first, difference.elements) == (name, first, 1)
        if name == "hybrid":
            assert {*difference.odd, *difference.others} == {1, 3}  # the two holders
        else:
            assert (difference.odd, difference.odd_ranks, difference.other_ranks) == ((odd,), 1, 3)
        (warning,) = version[0][1]
        assert f"differ in {name}, element [{first[0]}, 3] alone" in warning
        assert all(warnings == () for _, warnings in version[1:])
    ray.get([rank.do.remote(lambda self: __import__("torch").distributed.destroy_process_group()) for rank in ranks])


@pytest.mark.long
def test_random_flips_are_named_within_as_many_saves_as_holders() -> None:
    """Two hundred flips in tensors that are smaller and larger than a range, strided, or boxes: the rank, the tensor and the
    element are named, and nothing after the bit is as it was."""
    rng, world = np.random.default_rng(5), 3

    def state_of(rank: int) -> State:
        generator = torch.Generator().manual_seed(1)
        return {
            "large": torch.randn(530, 600, generator=generator),
            "strided": torch.randn(600, 530, generator=generator).t(),
            "small": torch.randn(33, 7, generator=generator),
            "scalar": torch.tensor(float("nan")),
            "box": raystow.Box(torch.randn(90, 40, generator=generator), (90, 40), (0, 0), tuple(range(world))),
            "own": raystow.PerRank({"noise": torch.full((5,), float(rank))}),
        }

    states = [state_of(rank) for rank in range(world)]
    with LocalCluster("memory://random-flips") as cluster:
        steps = iter(range(1, 1000))
        assert cluster.save_all(states, step=next(steps)).record.differences == ()
        for _ in range(200):
            odd, name = int(rng.integers(world)), str(rng.choice([one for one in states[0] if one != "own"]))
            value = states[odd][name]
            words = (value.local if isinstance(value, raystow.Box) else value).view(torch.int32)
            index = tuple(int(rng.integers(size)) for size in words.shape)
            mask = int(np.uint32(1 << rng.integers(32)).astype(np.int32))
            words[index] ^= mask
            saves = (cluster.save_all(states, step=next(steps)).record.differences for _ in range(world))
            (difference,) = next(filter(None, saves), (None,))
            assert difference is not None, (odd, name, index)
            assert (difference.name, difference.first, difference.elements, difference.odd) == (name, index, 1, (odd,))
            words[index] ^= mask
        assert cluster.save_all(states, step=next(steps)).record.differences == ()
