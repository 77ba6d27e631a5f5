"""The interface for torch's DCP, on gloo process groups without Ray, and its compatibility with the Checkpointer."""

from __future__ import annotations

import copy
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.builders import orphans
from helpers.local_cluster import LocalCluster, first_save
from helpers.state_equality import same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import raystow
from integration.dcp_failures import failure
from integration.gloo import RankFailed, Ranks, die
from integration.layouts import STEPS, Reads, build, state_of, train, whole
from raystow.dcp import Reader, Writer
from raystow.integrations.dcp.checkpoint_id import parse_id
from raystow.state.planner import plan_save
from raystow.storage.errors import RaystowError
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import OpenSession
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress


def trained(layout: str, n: int, seed: int) -> dict[str, Any]:
    model, optimizer = build(layout, n, seed, f"m{n}{layout}{seed}x{next(_CALLS)}")
    if seed == 1:
        train(model, optimizer, STEPS)
    state = state_of(model, optimizer, flat=False)
    return {**state, "step": 7 * seed, "lr": [0.1 * seed, float("nan")], "betas": (0.9, seed), "rng": bytes([seed])}


_CALLS = iter(range(1 << 30))


def save_by_dcp(rank: int, n: int, uri: str, layout: str) -> dict[str, Any]:
    state = trained(layout, n, 1)
    dcp.save(state, storage_writer=Writer(uri, step=7, metrics={"loss": 2.5}))
    return comparable(state)


def save_async(rank: int, n: int, uri: str, layout: str) -> dict[str, Any]:
    """Save with ``async_save``, and change the tensors immediately."""
    state = trained(layout, n, 1)
    saved = comparable(state)
    future = dcp.async_save(state, storage_writer=Writer(uri, step=7))
    for tensor in state["model"].values():
        tensor.detach().zero_()
    future.result()
    return saved


def load(rank: int, n: int, uri: str, layout: str) -> dict[str, Any]:
    state = trained(layout, n, 2)
    dcp.load(state, storage_reader=Reader(uri))
    return comparable(state)


def restore(rank: int, n: int, uri: str, layout: str) -> dict[str, Any]:
    """Restore with ``raystow.restore_latest``, strictly."""
    state = trained(layout, n, 2)
    version = raystow.restore_latest(uri, into=state)
    assert version is not None
    return comparable(state)


def stage(rank: int, n: int, address: str, openings: list[OpenSession], layout: str) -> dict[str, Any]:
    """Save through a node worker in another process, as the Checkpointer does."""
    state = trained(layout, n, 1)
    plan, ended = plan_save(state, rank=rank, world_size=n), queue.SimpleQueue[Entry | RaystowError]()
    staging = Staging(address, openings[rank])
    staging.submit(SaveOrder(first_save(openings[rank], step=7), plan, SaveProgress(7), ended.put))
    outcome = ended.get(timeout=60)
    staging.close()
    assert isinstance(outcome, Entry), outcome
    return comparable(state)


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) for name, value in whole(state).items()}


def agreed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(answer == answers[0] for answer in answers)
    assert sum("exp_avg" in name for name in answers[0]) == 18
    return answers[0]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp", 2), [("fsdp", 3), ("ddp", 2), ("plain", 1)]),
        (("fsdp", 3), [("fsdp", 2), ("fsdp", 3)]),
        (("ddp", 2), [("ddp", 3), ("fsdp", 2)]),
    ],
    ids=lambda case: "-".join(map(str, case)) if isinstance(case, tuple) else "",
)
def test_dcp_saves_are_loaded(ranks: Ranks, uri: str, saved: tuple[str, int], loaded: list[tuple[str, int]]) -> None:
    expected = agreed(ranks.call(saved[1], save_by_dcp, uri, saved[0]))
    repository = raystow.open(uri)
    (version,) = repository.versions()
    assert (version.step, version.world_size, version.metrics) == (7, saved[1], {"loss": 2.5})
    assert version.raw == sum(info.nbytes for info in version.tensors().values())  # each element is stored once
    assert orphans(repository) == []
    repository.verify(version)
    for layout, n in loaded:
        assert agreed(ranks.call(n, load, uri, layout)) == expected, (layout, n)
    assert agreed(ranks.call(loaded[0][1], restore, uri, loaded[0][0])) == expected


def test_async_save_stores_the_state_at_the_time_of_the_call(ranks: Ranks, uri: str) -> None:
    expected = agreed(ranks.call(2, save_async, uri, "fsdp"))
    assert agreed(ranks.call(2, load, uri, "fsdp")) == expected


@pytest.mark.parametrize("saved", [("fsdp", 2), ("ddp", 2)], ids=lambda case: "-".join(map(str, case)))
def test_the_checkpointer_saves_and_dcp_loads(ranks: Ranks, uri: str, saved: tuple[str, int]) -> None:
    layout, n = saved
    with LocalCluster(uri) as cluster:
        openings = [cluster.opening(rank, n) for rank in range(n)]
        expected = agreed(ranks.call(n, stage, cluster.address(0), openings, layout))
    assert agreed(ranks.call(3, load, uri, "fsdp")) == expected
    assert agreed(ranks.call(1, load, uri, "plain")) == expected


class KilledPlanner(DefaultSavePlanner):
    """Kills its process after some tensors were stored."""

    stored = 0

    def resolve_data(self, item: Any) -> Any:
        self.stored += 1
        if self.stored > 30:  # DCP resolves each tensor once before it stores the first
            die()
        return super().resolve_data(item)


def save_and_die(rank: int, n: int, uri: str) -> None:
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(40)}
    dcp.save(state, storage_writer=Writer(uri, step=8), planner=KilledPlanner() if rank == 1 else None)


def test_a_killed_writer_leaves_the_last_version(uri: str, tmp_path: Path, ranks: Ranks) -> None:
    expected = agreed(ranks.call(2, save_by_dcp, uri, "fsdp"))
    others = Ranks(tmp_path)
    try:
        with pytest.raises(RankFailed, match="rank 1 died"):
            others.call(2, save_and_die, uri)
        repository = raystow.open(uri)
        assert [version.step for version in repository.versions()] == [7]
        assert agreed(ranks.call(2, load, uri, "fsdp")) == expected
        assert agreed(others.call(2, save_by_dcp, uri, "fsdp")) == expected  # the failed save does not affect the next one
    finally:
        others.close()
    assert [version.step for version in repository.versions()] == [7, 7]
    assert orphans(repository)
    repository.plan_collection(grace=0).execute()
    assert orphans(repository) == []
    for version in repository.versions():
        repository.verify(version)


def refuse(rank: int, n: int, uri: str) -> list[str]:
    errors = []
    for odd in (object(), {1, 2}, torch.ones(2).to_sparse(), np.array(["a"]), lambda: 0):
        state = {"w": torch.ones(3), "of": {"rank": torch.ones(2), "kind": odd}}
        with pytest.raises(dcp.api.CheckpointException) as error:
            dcp.save(state, storage_writer=Writer(uri, step=1))
        errors += [str(next(iter(error.value.failures.values()))[0])]
        assert all(isinstance(failure[0], raystow.StateError) for failure in error.value.failures.values())
    return errors


def test_unsupported_values_are_refused_with_their_key(ranks: Ranks, uri: str) -> None:
    for errors in ranks.call(2, refuse, uri):
        assert len(errors) == 5
        assert all(text.startswith('state_dict["of.kind"]: ') for text in errors), errors
        assert "object is not a tensor" in errors[0]
    assert raystow.open(uri).versions() == []


def save_and_load_own_keys(rank: int, n: int, uri: str) -> tuple[Any, ...]:
    """Save and load a state whose other keys differ between ranks."""
    state = {"common": "c", "loader": {f"rank{rank}": {"seen": rank + 1, "order": [[rank], []]}}}
    dcp.save(state, storage_writer=Writer(uri))
    blank = {"common": "", "loader": {f"rank{rank}": {"seen": 0, "order": None}}}
    dcp.load(blank, storage_reader=Reader(uri))
    into = {"common": "", "loader": {f"rank{rank}": {"seen": 0, "order": [[0], []]}}}
    raystow.restore_latest(uri, into=into)
    return state, blank, into


def test_values_of_single_ranks_are_saved_and_loaded(ranks: Ranks, uri: str) -> None:
    for saved, loaded, restored in ranks.call(3, save_and_load_own_keys, uri):
        assert loaded == saved
        assert restored == saved


def read_rows(rank: int, n: int, uri: str) -> tuple[int, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(f"rows{next(_CALLS)}",))
    into = {"rows": zeros(4000, 1000, device_mesh=mesh, placements=[Shard(0)])}
    reads = Reads()
    dcp.load(into, storage_reader=Reader(uri))
    assert torch.equal(into["rows"].full_tensor(), rows())
    return sum(length for _, _, length in reads.ranges), [key for key, _, _ in reads.ranges]


def rows() -> torch.Tensor:
    return torch.randn(4000, 1000, generator=torch.Generator().manual_seed(3))


def test_a_rank_reads_only_overlapping_chunks(uri: str, tmp_path: Path) -> None:
    with LocalCluster(uri, threads=1) as cluster:  # several threads would pack chunks in order of completion
        version = cluster.save({"rows": rows(), "other": torch.randn(1000, 1000)}, step=1)
    reader = Ranks(tmp_path)
    try:
        reads = reader.call(2, read_rows, uri)
    finally:
        reader.close()
    stored = version.tensors()["rows"].stored
    assert all(read <= 0.8 * stored for read, _ in reads)  # half of the bytes, and the chunk across the middle
    assert all(len(keys) <= 3 for _, keys in reads)  # half of the four chunks, and the chunk across the middle


ODD = {
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "complex": torch.tensor([1 + 2j, complex("nan")], dtype=torch.complex128),
    "fp8": torch.arange(16).to(torch.float8_e4m3fn),
    "turned": torch.arange(12.0).reshape(3, 4).T,
    "large": torch.arange(3_000_000, dtype=torch.float32).reshape(3, -1),
    "nested": [{"a": [torch.ones(2, dtype=torch.bfloat16), 5]}, [], ()],
    "tuple": (1, [2.5, {"x": b"\0"}], torch.arange(3), ()),
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "number": np.float32(1.5),
    "plain": {"none": None, "yes": True, "big": 1 << 80, "text": "ü"},
}


def blank(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(blank, node))
    return np.zeros_like(node) if isinstance(node, np.ndarray) else type(node)(0) if isinstance(node, np.generic) else None


@pytest.mark.parametrize("by", ["dcp", "checkpointer"])
def test_every_kind_of_value_is_saved_without_pickle(uri: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("save", "load"):
        monkeypatch.delattr(torch, name)
    if by == "dcp":
        dcp.save(ODD, storage_writer=Writer(uri), no_dist=True)
    else:
        with LocalCluster(uri) as cluster:
            cluster.save(ODD, step=0)
    loaded = blank(ODD)
    dcp.load(loaded, storage_reader=Reader(uri), no_dist=True)
    assert same(loaded, ODD), loaded
    assert same(_load_state_dict_from_keys(storage_reader=Reader(uri)), ODD)  # loads without a target state
    restored = blank(ODD)
    raystow.restore_latest(uri, into=restored)
    assert same(restored, ODD), restored


@pytest.mark.s3
def test_dcp_saves_and_loads_on_s3(s3_uri: str) -> None:
    dcp.save(ODD, storage_writer=Writer(s3_uri, memory=1 << 20, threads=2), no_dist=True)
    loaded = blank(ODD)
    dcp.load(loaded, storage_reader=raystow.dcp.Reader(s3_uri, threads=2), no_dist=True)
    assert same(loaded, ODD), loaded


def test_steps_versions_and_metadata_are_found(uri: str) -> None:
    for step in (5, None):
        dcp.save({"w": torch.full((3, 2), 1.0), "n": step}, storage_writer=Writer(uri, step=step), no_dist=True)
    writer = Writer(uri)
    metadata = dcp.save({"w": torch.full((3, 2), 2.0), "n": 9}, storage_writer=writer, checkpoint_id="run/step-90", no_dist=True)
    assert writer.version == raystow.open(uri).latest()
    assert [version.step for version in raystow.open(uri).versions()] == [5, 6, 90]
    found = Reader(uri).read_metadata().state_dict_metadata
    assert found["w"] == metadata.state_dict_metadata["w"]
    assert isinstance(found["w"], TensorStorageMetadata)
    assert isinstance(found["n"], BytesStorageMetadata)
    raystow.open(uri).pin(writer.version, "best")
    readers = (Reader(uri), Reader(uri, version=1), Reader(uri, version="step:5"), Reader(uri, version="best"))
    for reader, at in (*((reader, {}) for reader in readers), (Reader(uri), {"checkpoint_id": "step_6"})):
        into = {"w": torch.zeros(3, 2), "n": 0}
        dcp.load(into, storage_reader=reader, no_dist=True, **at)
        assert reader.version is not None
        assert {1: 5, 2: None, 3: 9}[reader.version.id] == into["n"]
    with pytest.raises(dcp.api.CheckpointException, match="there is no version of step 7"):
        dcp.load({"n": 0}, storage_reader=Reader(uri), checkpoint_id="step-7", no_dist=True)


def test_documented_checkpoint_ids_are_parsed() -> None:
    steps = ("step-7", "a/step_7/", "checkpoint-7", "epoch=1-step=7.ckpt", Path("b/step-7"))
    assert [parse_id(one) for one in steps] == [7] * 5
    assert [parse_id(one) for one in ("best", "run/v2", "step-7-b", "epoch=3")] == ["best", "v2", "step-7-b", "epoch=3"]
    for wrong in ("7", "run/60", "", "latest", "step:7"):
        with pytest.raises(raystow.StateError, match="neither a step nor a name"):
            parse_id(wrong)


def test_a_checkpoint_id_may_be_a_name(uri: str) -> None:
    for number, name in enumerate(("best-v2", None, "last")):
        dcp.save({"n": number}, storage_writer=Writer(uri), checkpoint_id=name, no_dist=True)
    found = [{"n": -1}, {"n": -1}]
    dcp.load(found[0], storage_reader=Reader(uri, version="best-v2"), no_dist=True)
    dcp.load(found[1], storage_reader=Reader(uri), checkpoint_id="last", no_dist=True)
    assert found == [{"n": 0}, {"n": 2}]


def test_a_copied_writer_reports_its_version_to_the_original(uri: str) -> None:
    """A process-based executor pickles the Writer."""
    writer = Writer(uri)
    for _ in range(2):
        dcp.save({"n": 1}, storage_writer=(sent := copy.copy(writer)), no_dist=True)
        assert writer.version == sent.version == raystow.open(uri).latest()
    writer = Writer(uri)
    copy.copy(writer)
    assert writer.version is None


def test_unflattened_states_and_parts_of_versions_are_loaded(uri: str) -> None:
    state = {"model": {"w": torch.arange(6.0), "inner": {"1": "one"}}, "list": [1, (2, {"b": 3, "a": 4})], "n": 5}
    dcp.save(state, storage_writer=Writer(uri), planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    dcp.save(state, storage_writer=Writer(uri), no_dist=True)
    for version in (1, 2):
        into: dict[str, Any] = {"model": None, "list": None, "n": None}
        whole_values = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(into, storage_reader=Reader(uri, version=version), planner=whole_values, no_dist=True)
        assert same(into, state), into
        flat = {"model": {"w": torch.zeros(6), "inner": {"1": ""}}, "list": [0, (0, {})], "n": 0}
        dcp.load(flat, storage_reader=Reader(uri, version=version), no_dist=True)
        assert same(flat, state), flat
    with pytest.raises(dcp.api.CheckpointException, match="model: version 2 has a dict or list under this name"):
        dcp.load({"model": None}, storage_reader=Reader(uri), no_dist=True)


def test_errors_of_metadata_keep_their_type(uri: str, tmp_path: Path) -> None:
    assert type(failure({"n": 0}, Reader(uri))) is raystow.NotARepository
    with pytest.raises(dcp.api.CheckpointException, match="NotARepository"):
        _load_state_dict_from_keys(storage_reader=Reader(uri))
    dcp.save({"n": 1}, storage_writer=Writer(uri), no_dist=True)
    Path(uri, "root.json").write_bytes(b"{}")
    assert type(failure({"n": 0}, Reader(uri))) is raystow.Damaged
    files = str(tmp_path / "files")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=files, no_dist=True)
    error = failure({"w": torch.ones(3)}, Reader(files))
    assert type(error) is raystow.NotARepository
    assert "FileSystemReader" in str(error)
    with pytest.raises(dcp.api.CheckpointException, match="files of torch's FileSystemWriter"):
        dcp.save({"w": torch.ones(3)}, storage_writer=Writer(files), no_dist=True)
    assert not Path(files, "raystow.json").exists()


class Own(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError("never called")


def test_pickled_values_and_cached_plans_are_refused(uri: str) -> None:
    state = {"w": torch.ones(3), "n": 1}
    with pytest.raises(dcp.api.CheckpointException, match="plans cannot be cached"):
        dcp.save(state, storage_writer=Writer(uri), planner=DefaultSavePlanner(enable_plan_caching=True), no_dist=True)
    with pytest.raises(raystow.StateError, match="a commit needs all ranks"):
        dcp.save(state, storage_writer=Writer(uri), no_dist=True, use_collectives=False)
    dcp.save(state, storage_writer=Writer(uri), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="n: planner Own accepts values as pickles only"):
        dcp.load(state, storage_reader=Reader(uri), planner=Own(), no_dist=True)
    dcp.load({"w": torch.zeros(3)}, storage_reader=Reader(uri), planner=Own(), no_dist=True)


def refuse_placements(rank: int, n: int, uri: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    grid = init_device_mesh("cpu", (n, 1), mesh_dim_names=(f"outer{next(_CALLS)}", f"inner{next(_CALLS)}"))
    whole = {"shape": torch.Size((4, 3)), "stride": (3, 1)}
    dcp.save({"a": torch.ones(4, 3)}, storage_writer=Writer(uri))
    strided = DTensor.from_local(torch.ones(2, 3), grid, [_StridedShard(0, split_factor=2), Shard(1)], **whole)
    with pytest.raises(dcp.api.CheckpointException):  # DCP's planner or the Writer refuses it
        dcp.save({"a": strided}, storage_writer=Writer(uri))
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load({"a": strided}, storage_reader=Reader(uri))
    return [str(failure[0]) for failure in error.value.failures.values()]


def test_placements_that_dcp_misreads_are_refused(ranks: Ranks, uri: str) -> None:
    for errors in ranks.call(2, refuse_placements, uri):
        assert len(errors) == 2
        assert all("ranks hold more than one box" in text and text.startswith('state_dict["a"]: ') for text in errors), errors
    assert len(raystow.open(uri).versions()) == 1


def load_different_versions(rank: int, n: int, uri: str) -> str:
    dcp.save({"a": torch.ones(4)}, storage_writer=Writer(uri))
    dcp.save({"a": torch.ones(4)}, storage_writer=Writer(uri))
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load({"a": torch.zeros(4)}, storage_reader=Reader(uri, version=rank + 1))
    return str(error.value.failures[0][0])


def test_ranks_that_load_different_versions_are_refused(ranks: Ranks, uri: str) -> None:
    assert all("different newest versions: 1, 2" in error for error in ranks.call(2, load_different_versions, uri))


def save_one_shard(rank: int, n: int, uri: str) -> str:
    """Save on rank 0 alone a tensor that is sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(f"part{next(_CALLS)}",))
    state = {"w": distribute_tensor(torch.ones(6), mesh, [Shard(0)])}
    if rank:
        return ""
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.save(state, storage_writer=Writer(uri), no_dist=True)
    return str(error.value.failures[0][0])


def test_incomplete_tensors_are_refused(ranks: Ranks, uri: str) -> None:
    assert "does not add up to whole tensors" in ranks.call(2, save_one_shard, uri)[0]
    assert raystow.open(uri).versions() == []


def test_a_newer_writer_fences_the_older_process(ranks: Ranks, uri: str) -> None:
    ranks.call(2, save_and_load_own_keys, uri)
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(uri), no_dist=True)
    with pytest.raises(RankFailed, match="Fenced"):
        ranks.call(2, save_and_load_own_keys, uri)
    assert len(raystow.open(uri).versions()) == 2


def test_retention_is_applied_and_damage_is_detected(uri: str) -> None:
    policy = raystow.Policy(keep_last=2)
    for step in range(4):
        dcp.save({"w": torch.full((5000,), float(step))}, storage_writer=Writer(uri, step=step, retention=policy), no_dist=True)
    repository = raystow.open(uri)
    assert [version.step for version in repository.versions()] == [2, 3]
    pack = next(Path(uri).glob("versions/00000004-*/*.pack"))
    pack.write_bytes(b"\xff" * pack.stat().st_size)
    with pytest.raises(dcp.api.CheckpointException, match="do not match their digest"):
        dcp.load({"w": torch.zeros(5000)}, storage_reader=Reader(uri), no_dist=True)
    into = {"w": torch.zeros(5000)}
    dcp.load(into, storage_reader=Reader(uri, version=3), no_dist=True)
    assert torch.equal(into["w"], torch.full((5000,), 2.0))
