"""Tensors that consist of others are stored by these, and come back as they were, or an error names them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fake_ranks import as_ranks
from helpers.local_cluster import LocalCluster
from helpers.wrapper_classes import Derived, Flat, Opaque, Quantized, RowScaled, Secretive
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import raystow
from raystow.state.value_text import dumps
from raystow.storage.errors import StateError


def sharded(local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], *placements: Any) -> DTensor:
    """Return a DTensor with this local tensor, whatever it is."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements or (Shard(0),), tensor_meta=meta), requires_grad=False)


def two(*shape: int, fill: bool = True) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape)) if fill else TwoTensor(torch.zeros(shape), torch.zeros(shape))


def test_wrappers_are_filled_in_place() -> None:
    state = {
        "plain": two(3, 4),
        "parameter": torch.nn.Parameter(two(5)),
        "buffer": torch.nn.Buffer(two(5)),
        "nested": TwoTensor(two(2), two(2)),
        "quantized": Quantized.random((6, 5)),
        "boxed": raystow.Box(two(2, 3), (2, 3), (0, 0)),
    }
    into = {
        "plain": two(3, 4, fill=False),
        "parameter": torch.nn.Parameter(two(5, fill=False)),
        "buffer": torch.nn.Buffer(two(5, fill=False)),
        "nested": TwoTensor(two(2, fill=False), two(2, fill=False)),
        "quantized": state["quantized"].blank(),
        "boxed": raystow.Box(two(2, 3, fill=False), (2, 3), (0, 0)),
    }
    before = dict(into)
    with LocalCluster("memory://wrappers") as cluster:
        version = cluster.save(state, step=1)
    raystow.restore(cluster.uri, into)
    assert all(into[name] is before[name] for name in into)
    assert isinstance(into["parameter"], torch.nn.Parameter)
    assert into["quantized"].same(state["quantized"])
    for one, other in ((into[name], state[name]) for name in ("plain", "parameter", "buffer")):
        assert torch.equal(one.a, other.a)
        assert torch.equal(one.b, other.b)
    assert torch.equal(into["nested"].b.a, state["nested"].b.a)
    assert torch.equal(into["boxed"].local.b, state["boxed"].local.b)
    assert torch.equal(version.read("quantized.codes"), state["quantized"].codes)
    assert torch.equal(version.read("nested.a.b"), state["nested"].a.b)


def test_wrapper_changes_between_saves_are_saved() -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "n": {"x": 1}}
    with LocalCluster("memory://changing") as cluster:
        for step, tensor in enumerate((torch.ones(3), two(3), two(3), torch.ones(3), Quantized.random((4,), 4))):
            state["w"] = tensor
            version = cluster.save(state, step=step)
            names = {TwoTensor: {"w.a", "w.b"}, torch.Tensor: {"w"}, Quantized: {"w.codes", "w.scale", "w.table"}}
            assert version.tensors().keys() == names[type(tensor)]
        state["w"].codes.add_(1)
        assert torch.equal(cluster.save(state, step=9).read("w.codes"), state["w"].codes)


def rows(rank: int, world: int, count: int) -> slice:
    """The rows that ``torch.chunk`` gives a rank."""
    each = -(-count // world)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


SHAPE = (10, 6)


def quantized_shards(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    mine = rows(rank, mesh.size(), SHAPE[0])
    local = Quantized.random((mine.stop - mine.start, SHAPE[1]))
    return {"optim": {"m": sharded(local, mesh, SHAPE)}, "step": 3}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_that_are_wrappers_come_back_in_the_same_layout(world: int) -> None:
    """The own wrapper of the issue was stored dequantized, and its codes were not restored."""
    states = as_ranks(world, quantized_shards)
    with LocalCluster(f"memory://shards-{world}") as cluster:
        version = cluster.save_all(states, step=1)
    assert version.tensors()["optim.m.codes"].shape == SHAPE
    assert version.tensors()["optim.m.codes"].dtype == "int8"
    for rank, state in enumerate(as_ranks(world, quantized_shards)):
        raystow.restore(version, state)
        assert state["optim"]["m"]._local_tensor.same(states[rank]["optim"]["m"]._local_tensor)
    name = "optim.m.scale" if world == 1 else f"optim.m.scale.[0:{-(-SHAPE[0] // world)}, 0:6]"
    assert torch.equal(version.read(name), states[0]["optim"]["m"]._local_tensor.scale)


def test_parts_of_one_shard_are_refused_in_other_layouts() -> None:
    states = as_ranks(2, quantized_shards)
    with LocalCluster("memory://other-layout") as cluster:
        version = cluster.save_all(states, step=1)
    for world in (1, 4):
        for state in as_ranks(world, quantized_shards):
            before = state["optim"]["m"]._local_tensor.codes.clone()
            with pytest.raises(StateError, match=r"in `into` but not saved: optim\.m\.scale"):
                raystow.restore(version, state)
            assert torch.equal(state["optim"]["m"]._local_tensor.codes, before)
    columns = lambda rank, mesh: {"optim": {"m": sharded(Quantized.random((10, 3)), mesh, SHAPE, Shard(1))}, "step": 0}  # noqa: E731
    for state in as_ranks(2, columns):  # as many elements, scales of the same shape
        with pytest.raises(StateError, match=r"not saved: optim\.m\.scale\.\[0:10, "):
            raystow.restore(version, state)


def test_inner_tensors_split_like_their_wrapper_are_resharded() -> None:
    codes, scale = torch.randint(-128, 128, (10, 6), dtype=torch.int8), torch.randn(10, 1)

    def shard(rank: int, mesh: DeviceMesh, *, fill: bool = True) -> dict[str, Any]:
        mine = rows(rank, mesh.shape[-1] and mesh.size(), 10)
        return {"w": sharded(RowScaled(codes[mine] * fill, scale[mine] * fill), mesh, (10, 6))}

    with LocalCluster("memory://row-scaled") as cluster:
        version = cluster.save_all(as_ranks(4, shard), step=1)
    assert torch.equal(version.read("w.scale"), scale)
    for world in (1, 2, 3, 7):
        into = as_ranks(world, lambda rank, mesh: shard(rank, mesh, fill=False))
        for rank, state in enumerate(into):
            raystow.restore(version, state)
            assert torch.equal(state["w"]._local_tensor.codes, codes[rows(rank, world, 10)])
            assert torch.equal(state["w"]._local_tensor.scale, scale[rows(rank, world, 10)])
    whole = {"w": RowScaled(torch.zeros_like(codes), torch.zeros_like(scale))}
    raystow.restore(version, whole)
    assert torch.equal(whole["w"].codes, codes)


def test_replicas_of_shards_are_stored_once() -> None:
    """As HSDP places them: two replicas of two shards."""
    locals_ = [Quantized.random((5, 6)), Quantized.random((5, 6))]

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": sharded(locals_[rank % 2], mesh, SHAPE, Replicate(), Shard(0))}

    with LocalCluster("memory://replicas") as cluster:
        version = cluster.save_all(as_ranks(4, make, (2, 2)), step=1)
    assert version.raw == sum(one.codes.nbytes + one.scale.nbytes + one.table.nbytes for one in locals_)
    blank = as_ranks(4, lambda rank, mesh: {"w": sharded(locals_[0].blank(), mesh, SHAPE, Replicate(), Shard(0))}, (2, 2))
    for rank, state in enumerate(blank):
        raystow.restore(version, state)
        assert state["w"]._local_tensor.same(locals_[rank % 2])


def test_ranks_without_rows_may_have_plain_tensors() -> None:
    """As low-bit optimizers do: an empty shard is too small to be quantized."""
    local = Quantized.random((1, 6))

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"n": 1, "m": sharded(local if rank == 0 else torch.zeros(0, 6), mesh, (1, 6))}

    with LocalCluster("memory://empty-shards") as cluster:
        version = cluster.save_all(as_ranks(3, make), step=1)
    for state in as_ranks(3, make):
        raystow.restore(version, state)
    assert torch.equal(version.read("m.codes"), local.codes)


def flat(rank: int, mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> DTensor:
    mine = rows(rank, mesh.size(), shape[dim])
    local = (*shape[:dim], mine.stop - mine.start, *shape[dim + 1 :])
    return sharded(Flat(torch.arange(1, 1 + math.prod(local), dtype=torch.int8), local), mesh, shape, Shard(dim))


@pytest.mark.parametrize(("shape", "dim"), [((3, 6), 0), ((1, 6), 0), ((6, 1), 1)])
def test_shards_without_elements_are_wrappers_too(shape: tuple[int, ...], dim: int) -> None:
    states = as_ranks(4, lambda rank, mesh: {"m": flat(rank, mesh, shape, dim)})
    with LocalCluster(f"memory://no-elements-{shape[0]}-{shape[1]}") as cluster:
        cluster.save_all(states, step=1)
        version = cluster.save_all(states, step=2)
    for rank, state in enumerate(as_ranks(4, lambda rank, mesh: {"m": flat(rank, mesh, shape, dim)})):
        state["m"]._local_tensor.codes.zero_()
        raystow.restore(version, state)
        assert torch.equal(state["m"]._local_tensor.codes, states[rank]["m"]._local_tensor.codes)


def test_ranks_with_other_metadata_of_a_wrapper_are_named(caplog: pytest.LogCaptureFixture) -> None:
    inner = torch.ones(2, 6, dtype=torch.int8), torch.ones(3), torch.ones(16)
    with LocalCluster("memory://metadata-of-ranks") as cluster:
        cluster.save_all([{"m": Quantized(*inner, block)} for block in (4, 4, 8)], step=1)
    assert [text for text in caplog.messages if "rank 2 and ranks 0-1 differ in m.__class__" in text]


@pytest.mark.parametrize("world", [1, 3])
def test_descriptions_are_no_values_of_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning would say that a rank gets another's value, or that it is lost."""
    codes, scale = torch.ones(2, 6, dtype=torch.int8), torch.ones(2, 1)
    nothing, box = torch.zeros(0, 6), raystow.Box(RowScaled(codes, scale), (2, 6), (0, 0))
    with LocalCluster(f"memory://descriptions-{world}") as cluster:
        cluster.save_all([{"m": raystow.Box(nothing, (2, 6), (0, 0))}, {"m": box}], step=1)
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        into = {"m": raystow.Box(RowScaled(torch.zeros_like(codes), torch.zeros_like(scale)), (2, 6), (0, 0))}
        raystow.restore(cluster.uri, into)
        assert torch.equal(into["m"].local.codes, codes)
    assert not [record for record in caplog.records if "__class__" in record.getMessage()]


def test_no_marker_is_proposed_within_a_tensor() -> None:
    with LocalCluster("memory://proposed") as cluster:
        version = cluster.save({"w": Quantized.random((6, 5)), "x": 1}, step=1)
    with pytest.raises(StateError, match=r"saved but not in `into`: w\.table") as error:
        raystow.restore(version, {"w": RowScaled(torch.zeros(6, 5, dtype=torch.int8), torch.zeros(6, 1)), "x": 1})
    assert "AsSaved" not in str(error.value)


def test_a_wrapper_around_a_dtensor_is_restored() -> None:
    tensor = torch.randn(6, 2)

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        part = tensor[rows(rank, mesh.size(), 6)].clone()
        return {"w": TwoTensor(sharded(part, mesh, (6, 2)), sharded(part * 2, mesh, (6, 2)))}

    with LocalCluster("memory://around") as cluster:
        version = cluster.save_all(as_ranks(2, make), step=1)
    assert torch.equal(version.read("w.b"), tensor * 2)
    for state in as_ranks(3, make):
        state["w"].a._local_tensor.zero_()
        raystow.restore(version, state)
        assert torch.equal(state["w"].a._local_tensor * 2, state["w"].b._local_tensor)


def test_tensors_of_asynchronous_collectives_are_plain() -> None:
    tensor = torch.randn(4)
    with LocalCluster("memory://collective") as cluster:
        version = cluster.save({"w": AsyncCollectiveTensor(tensor)}, step=1)
        assert torch.equal(version.read("w"), tensor)
        assert torch.equal(
            cluster.save(as_ranks(1, lambda _, mesh: {"w": sharded(AsyncCollectiveTensor(tensor), mesh, (4,))})[0], step=2).read(
                "w"
            ),
            tensor,
        )
    target = torch.zeros(4)
    raystow.restore(version, {"w": AsyncCollectiveTensor(target)})
    assert torch.equal(target, tensor)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Quantized.random((6, 5), block=5), r'into\["w"\]: is .*"block", 5.*, but version 1 holds .*"block", 4'),
        (lambda: RowScaled(torch.zeros(6, 5, dtype=torch.int8), torch.zeros(6, 1)), r"saved but not in `into`: w\.table"),
        (lambda: type("Other", (Quantized,), {}).random((6, 5)), r'into\["w"\]: is .*Other'),
        (lambda: Quantized.random((5, 6)), r'into\["w'),
        (lambda: torch.zeros(6, 5), r"in `into` but not saved: w; saved but not in `into`: w\.__class__, w\.codes"),
    ],
)
def test_other_metadata_is_an_error_and_changes_nothing(other: Callable[[], Any], message: str) -> None:
    with LocalCluster("memory://metadata") as cluster:
        version = cluster.save({"w": Quantized.random((6, 5))}, step=1)
    into = {"w": other()}
    before = getattr(into["w"], "codes", into["w"]).clone()
    with pytest.raises(StateError, match=message):
        raystow.restore(version, into)
    assert torch.equal(getattr(into["w"], "codes", into["w"]), before)


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def functional() -> torch.Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no parts": (lambda: torch.ones(3).as_subclass(Opaque), "tensors of class Opaque cannot be stored"),
    "a parameter of one": (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Opaque)), "tensors of class Opaque"),
    "a box of one": (lambda: raystow.Box(torch.ones(3).as_subclass(Opaque), (3,), (0,)), "tensors of class Opaque"),
    "within a wrapper": (
        lambda: TwoTensor(torch.ones(3).as_subclass(Opaque), torch.ones(3).as_subclass(Opaque)),
        "tensors of class Opaque",
    ),
    "a part that is made anew": (
        lambda: Derived(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1)),
        "Derived.scale is a new",
    ),
    "an object in its metadata": (
        lambda: Secretive(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1)),
        "its metadata has a builtins.object",
    ),
    "fake": (fake, "tensors of class FakeTensor"),
    "functional": (functional, "tensors of class FunctionalTensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta tensors"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensors"),
    "masked": (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "tensors of class MaskedTensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_classes_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with LocalCluster("memory://refused") as cluster:
        with pytest.raises(StateError, match=rf'state\["model"\]\["w"\].*: .*{message}'):
            cluster.save({"model": {"w": make()}}, step=1)
        version = cluster.save({"model": {"w": torch.ones(3)}}, step=2)
    with pytest.raises(StateError, match=rf'into\["model"\]\["w"\].*: .*{message}|not saved: model\.w\.'):
        raystow.restore(version, {"model": {"w": make()}})


@pytest.mark.parametrize("kind", ["no parts", "fake", "functional", "an object in its metadata"])
def test_shards_of_other_classes_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    (state,) = as_ranks(1, lambda _, mesh: {"w": sharded(local := make(), mesh, tuple(local.shape))})
    with LocalCluster("memory://refused-shards") as cluster, pytest.raises(StateError, match=rf'state\["w"\]: {message}'):
        cluster.save(state, step=1)


def test_names_that_collide_are_an_error() -> None:
    with LocalCluster("memory://collide") as cluster, pytest.raises(StateError, match=r"has the same name 'w\.a' as"):
        cluster.save({"w": two(3), "w.a": torch.ones(3)}, step=1)


def uneven(sizes: tuple[int, ...], whole: torch.Tensor, *, listed: bool = True) -> Callable[[int, DeviceMesh], dict[str, Any]]:
    """Shards of any sizes, which say where they are as Megatron-FSDP's do."""

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        start = sum(sizes[:rank])
        local = whole[start : start + sizes[rank]].clone()
        tensor = sharded(local, mesh, tuple(whole.shape))
        if listed:
            chunk = ChunkStorageMetadata(torch.Size((start, 0)), local.shape)
            tensor._local_tensor.__create_chunk_list__ = lambda: [chunk]
        return {"w": tensor, "n": rank}

    return make


def test_uneven_shards_that_say_where_they_are_are_resharded() -> None:
    tensor = torch.randn(8, 3)
    with LocalCluster("memory://uneven-shards") as cluster:
        version = cluster.save_all(as_ranks(4, uneven((1, 2, 5, 0), tensor)), step=1)
        again = cluster.save_all(as_ranks(4, uneven((1, 2, 5, 0), tensor * 2)), step=2)
    assert torch.equal(version.read("w"), tensor)
    assert torch.equal(again.read("w"), tensor * 2)
    for sizes in ((1, 2, 5, 0), (4, 4), (3, 0, 5)):
        for state, kept in zip(as_ranks(len(sizes), uneven(sizes, tensor * 0)), torch.split(tensor, sizes), strict=True):
            raystow.restore(version, state)
            assert torch.equal(state["w"]._local_tensor, kept)


def test_uneven_shards_without_a_place_are_refused() -> None:
    states = as_ranks(2, uneven((3, 5), torch.randn(8, 3), listed=False))
    with LocalCluster("memory://silent") as cluster, pytest.raises(StateError, match=r"this rank holds .* raystow\.Box"):
        cluster.save(states[0], step=1, world_size=2)


def test_shards_that_say_something_wrong_make_no_version() -> None:
    states = as_ranks(2, uneven((4, 4), torch.randn(8, 3)))
    chunk = ChunkStorageMetadata(torch.Size((3, 0)), torch.Size((4, 3)))
    states[1]["w"]._local_tensor.__create_chunk_list__ = lambda: [chunk]
    with LocalCluster("memory://wrong") as cluster, pytest.raises(raystow.SaveFailed, match="whole tensor 'w'"):
        cluster.save_all(states, step=1)


def test_strided_shards_of_several_boxes_are_resharded() -> None:
    tensor = torch.randn(12, 3)

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        local = tensor.reshape(3, 2, 2, 3)[:, rank].reshape(6, 3).clone()  # of each third one half
        return {"w": sharded(local, mesh, (12, 3), _StridedShard(0, split_factor=3))}

    states = as_ranks(2, make)
    with LocalCluster("memory://strided") as cluster:
        version = cluster.save_all(states, step=1)
    assert torch.equal(version.read("w"), tensor)
    for rank, state in enumerate(as_ranks(2, make)):
        state["w"]._local_tensor.zero_()
        raystow.restore(version, state)
        assert torch.equal(state["w"]._local_tensor, states[rank]["w"]._local_tensor)


@pytest.mark.parametrize("leaf", [two(3), raystow.Box(torch.ones(3), (3,), (0,))], ids=["wrapper", "box"])
def test_states_built_from_leaves_refuse_parts_of_tensors(leaf: Any) -> None:
    """Else a ``client_state`` would have a dict in place of the tensor."""
    with pytest.raises(StateError, match=r'client_state\["w"\]: .*class (TwoTensor|.*Box)'):
        dumps({"w": leaf}, what="client_state")
