"""States saved by N ranks are restored by M ranks, bit for bit, under any parallelism; each rank reads only overlapping chunks.

``make test`` covers every parallelism on at most four ranks; ``make soak`` covers all pairs of world sizes up to eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.layouts import STEPS, ProcessGroup, Reads, check_reads, overlapping
from raystow.state.planner import plan_save

WORLDS = (1, 2, 3, 4, 8)


def named(case: object) -> str:
    """Return a test id from a pair of layout and world size."""
    return "-".join(map(str, case)) if isinstance(case, tuple) else ""


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    world = ProcessGroup(tmp_path_factory.mktemp("groups"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The repository of one run: each test restores the version that it saved last."""
    return str(tmp_path_factory.mktemp("run"))


def same_on_all_ranks(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Assert that all ranks report the same whole state, and return it."""
    assert all(answer["whole"] == answers[0]["whole"] for answer in answers)
    return answers[0]["whole"]


def check(world: ProcessGroup, uri: str, saved: tuple[str, int], restored: list[tuple[str, int]], flat: bool = True) -> None:
    answers = world.call("save", saved[1], uri, saved[0], flat)
    expected = same_on_all_ranks(answers)
    assert sum("exp_avg" in name for name in expected) == 18
    latest = raystow.open(uri).latest()
    assert latest is not None
    assert latest.raw == sum(info.nbytes for info in latest.tensors().values())  # each element is stored once
    for layout, n in restored:
        got = world.call("restore", n, uri, layout, flat, STEPS if (layout, n) == saved else 0)
        assert same_on_all_ranks(got) == expected, (layout, n)
        assert all(answer["read"] <= latest.raw for answer in got)
        if (layout, n) == saved:
            assert [answer["after"] for answer in got] == [answer["after"] for answer in answers]


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        pytest.param(("fsdp", 3), [("fsdp", 3), ("fsdp", 4), ("fsdp", 1), ("ddp", 2)], marks=pytest.mark.long),
        (("ddp", 2), [("ddp", 2), ("hsdp", 4), ("tp", 3)]),
        (("hsdp", 4), [("hsdp", 4), ("fsdp", 2), ("plain", 1)]),
        pytest.param(("fsdp_tp", 4), [("fsdp_tp", 4), ("tp_beside_dp", 4), ("tp", 2)], marks=pytest.mark.long),
        (("tp_beside_dp", 4), [("fsdp_tp_wide", 4), ("fsdp", 3)]),
        (("plain", 1), [("hsdp_tp", 4)]),
    ],
    ids=named,
)
def test_layouts_are_restored_on_up_to_four_ranks(
    world: ProcessGroup, uri: str, saved: tuple[str, int], restored: list[tuple[str, int]]
) -> None:
    check(world, uri, saved, restored)


@pytest.mark.slow
@pytest.mark.parametrize("n", WORLDS)
def test_fsdp_is_restored_on_any_number_of_ranks(world: ProcessGroup, uri: str, n: int) -> None:
    check(world, uri, ("fsdp", n), [("fsdp", m) for m in WORLDS])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (("plain", 1), [("ddp", 3), ("hsdp", 4), ("fsdp_tp", 8)]),
        (("ddp", 2), [("ddp", 2), ("ddp", 4), ("plain", 1), ("fsdp", 3)]),
        (("hsdp", 4), [("hsdp", 4), ("hsdp", 8), ("hsdp", 2), ("fsdp", 3), ("plain", 1)]),
        (("hsdp", 8), [("hsdp", 4), ("hsdp", 3), ("ddp", 2)]),
        (("tp", 2), [("tp", 2), ("tp", 4), ("tp", 8), ("plain", 1)]),
        (("tp", 8), [("tp", 3), ("tp", 1), ("fsdp", 4)]),
        (("tp_beside_dp", 4), [("tp_beside_dp", 8), ("fsdp", 2)]),
        (("fsdp_tp", 4), [("fsdp_tp", 4), ("plain", 1), ("fsdp_tp", 8), ("fsdp_tp_wide", 8), ("hsdp_tp", 8), ("tp", 3)]),
        (("fsdp_tp_wide", 8), [("fsdp_tp", 4), ("fsdp", 3), ("hsdp", 4)]),
        (("hsdp_tp", 8), [("hsdp_tp", 8), ("fsdp_tp", 4), ("ddp", 2)]),
    ],
    ids=named,
)
def test_layouts_are_restored_in_other_layouts(
    world: ProcessGroup, uri: str, saved: tuple[str, int], restored: list[tuple[str, int]]
) -> None:
    check(world, uri, saved, restored)


@pytest.mark.long
def test_a_nested_optimizer_state_is_restored(world: ProcessGroup, uri: str) -> None:
    """The names are not flattened: ``optim.state.<name>.exp_avg``, and a list of groups."""
    check(world, uri, ("fsdp", 4), [("fsdp", 3), ("tp", 2)], flat=False)


def save_rows(rank: int, n: int, uri: str, tag: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(tag,))
    state = {
        "rows": distribute_tensor(rows(), mesh, [Shard(0)]),
        "halves": distribute_tensor(rows()[:9].bfloat16(), mesh, [Shard(1)]),
        "everywhere": rows()[0],
        "step": 7,
    }
    with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
        torch.distributed.barrier()  # as a training step would: no rank saves before all have joined
        checkpointer.save(state, step=7).result(60)


def rows() -> torch.Tensor:
    return torch.randn(1000, 250, generator=torch.Generator().manual_seed(3))


def restore_rows(rank: int, n: int, uri: str, tag: str) -> int:
    """Restore to other placements, dtypes and fewer names; return the bytes that were read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(tag,))
    reads = Reads()
    with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
        mine = zeros(1000, 250, device_mesh=mesh, placements=[Shard(0)])
        version = checkpointer.restore_latest(into={"rows": mine}, strict=False)
        assert torch.equal(mine.full_tensor(), rows())
        expected_chunks = overlapping(version, {"rows": mine})
        check_reads(reads.ranges, expected_chunks)
        read = sum(length for _, _, length in reads.ranges)
        assert read == sum(chunk.coding.size for chunk in expected_chunks)  # chunks are larger than a gap that is read

        into = {
            "rows": zeros(1000, 250, device_mesh=mesh, placements=[Shard(1)], dtype=torch.bfloat16),
            "halves": distribute_tensor(torch.zeros(9, 250), mesh, [Replicate()]),
            "everywhere": zeros(250, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64),
        }
        with pytest.raises(raystow.StateError) as error:
            checkpointer.restore_latest(into=into, strict=False)
        assert "bfloat16 (1000, 250), but version" in str(error.value)
        assert "holds float32 (1000, 250)" in str(error.value)
        checkpointer.restore_latest(into=into, strict=False, cast=True)
        assert torch.equal(into["rows"].full_tensor(), rows().bfloat16())
        assert torch.equal(into["halves"].full_tensor(), rows()[:9].bfloat16().float())
        assert torch.equal(into["everywhere"].full_tensor(), rows()[0].double())

        with pytest.raises(raystow.StateError) as error:
            checkpointer.restore_latest(into={"rows": mine, "columns": mine, "step": 0})
        assert "in `into` but not saved: columns; saved but not in `into`: everywhere, halves" in str(error.value)
    return read


def test_parts_are_cast_and_only_overlapping_bytes_are_read(world: ProcessGroup, uri: str) -> None:
    world.call("do", 4, save_rows, uri, "a")
    reads = world.call("do", 3, restore_rows, uri, "b")
    latest = raystow.open(uri).latest()
    assert latest is not None
    stored = latest.tensors()["rows"].stored
    assert max(reads) < 0.6 * stored  # two of four shards
    assert sum(reads) < 1.6 * stored


def refuse(rank: int, n: int, tag: str) -> list[str]:
    """Return the errors for parts of which nothing says where they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    line = init_device_mesh("cpu", (4,), mesh_dim_names=(f"line{tag}",))
    whole = {"shape": torch.Size((8, 3)), "stride": (3, 1)}
    uneven = DTensor.from_local(torch.ones(rank % 2 * 2 + 1, 3), line, [Shard(0)], **whole)
    partial = DTensor.from_local(torch.ones(8, 3), line, [Partial()])
    errors = []
    for tensor in (uneven, partial):
        with pytest.raises(raystow.StateError) as error:
            plan_save({"a": {"b": tensor}}, rank=rank, world_size=n)
        errors.append(str(error.value))
    return errors


def test_placements_that_do_not_say_where_parts_are_are_refused(world: ProcessGroup) -> None:
    for uneven, partial in world.call("do", 4, refuse, "c"):
        assert partial.startswith('state["a"]["b"]: DTensors placed as ')
        assert uneven.startswith('state["a"]["b"]: this rank holds ')
        assert "raystow.Box" in uneven
