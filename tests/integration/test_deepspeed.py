"""``raystow.deepspeed`` with real engines: every ZeRO stage and world size restores the saves of every other, bit for bit."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed.checkpoint as dcp
from ray.cluster_utils import Cluster

import raystow
from integration.gloo import RankFailed
from raystow.storage.errors import NotFound

pytest.importorskip("deepspeed", reason="make test-frameworks installs DeepSpeed in an environment of its own")

from integration.deepspeed_ranks import WIDTH, Net, config, digests, engine_of, new_ranks, run, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed_zero.py"
CLIENT_STATE = {"epoch": 3, "seen": (1, "a"), "rng": torch.arange(5, dtype=torch.uint8), "empty": {}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


def save(engine: Any, steps: int, tag: str | None = None) -> dict[str, str]:
    train(engine, steps)
    found = digests(engine)
    engine.save_checkpoint("checkpoints", tag=tag, client_state=CLIENT_STATE)
    train(engine, 1)  # waits in the fence until the tensors were copied
    return found


def load(engine: Any, *tags: str) -> list[dict[str, str]]:
    found = []
    for tag in tags or (None,):
        path, client_state = engine.load_checkpoint("checkpoints", tag=tag)
        assert path is not None
        assert repr(client_state) == repr(CLIENT_STATE)
        found.append(digests(engine))
    return found


@pytest.mark.parametrize(
    ("saved", "restored", "dtype", "options"),
    [
        pytest.param((2, 1), (3, 3), "bf16", {}, id="1-to-3"),
        pytest.param((3, 3), (2, 2), "bf16", {}, id="3-to-2"),
        pytest.param((2, 2), (1, 1), "fp16", {}, id="loss-scale"),
        pytest.param((1, 2), (2, 3), "fp32", OFFLOAD, id="offload"),
        pytest.param((2, 1), (1, 1), "bf16", FP32_GRADIENTS, id="fp32-gradients"),
    ],
)
def test_another_stage_restores_every_bit(
    cluster: Cluster, tmp_path: Path, saved: tuple[int, int], restored: tuple[int, int], dtype: str, options: dict[str, Any]
) -> None:
    uri = str(tmp_path / "run")
    [expected, *_] = run(tmp_path / "a", saved[0], cluster.address, uri, config(saved[1], dtype, options), save, 6)
    assert (", 3, {" in expected["progress"]) == (dtype == "fp16"), "three of six steps are skipped"
    for found in run(tmp_path / "b", restored[0], cluster.address, uri, config(restored[1], dtype, options), load):
        assert found == [expected]


@pytest.mark.slow
def test_every_stage_and_world_restores_every_other(cluster: Cluster, tmp_path: Path) -> None:
    uri, worlds = str(tmp_path / "run"), list(itertools.product((1, 2, 3, 4), (1, 2, 3)))
    tags = [f"{n}-ranks-stage-{stage}" for n, stage in worlds]
    expected = [
        run(tmp_path / tag, n, cluster.address, uri, config(stage, "bf16"), save, 2, tag)[0]
        for tag, (n, stage) in zip(tags, worlds, strict=True)
    ]
    for n, stage in worlds:
        for found in run(tmp_path / f"{n}{stage}", n, cluster.address, uri, config(stage, "bf16"), load, *tags):
            assert found == expected


def offload(engine: Any, *kinds: str) -> None:
    from deepspeed.ops.adam import fused_adam
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    fused_adam.FusedAdam = type(engine.optimizer.optimizer)  # ZeRO 3 refuses others, and this one needs a GPU
    engine.offload_states(include={OffloadStateTypeEnum(kind) for kind in kinds}, pin_memory=False)


def save_while_offloaded(engine: Any) -> dict[str, str]:
    """Save while parts of the state are offloaded, as a trainer that shares its GPUs with inference does."""
    train(engine, 2)
    found = digests(engine)
    offload(engine, "optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer")
    engine.save_checkpoint("checkpoints", client_state=CLIENT_STATE)
    engine.reload_states()
    train(engine, 1)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_saved_while_offloaded_is_restored(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    uri = str(tmp_path / "run")
    [expected, _] = run(tmp_path / "a", 2, cluster.address, uri, config(stage, "bf16"), save_while_offloaded)
    version = raystow.latest(uri)
    assert version is not None
    assert {name.rpartition(".")[2] for name in version.tensors() if name.startswith("optim.")} <= {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert run(tmp_path / "b", 1, cluster.address, uri, config(5 - stage, "bf16"), load) == [[expected]]


def resume(engine: Any, end: int) -> list[str]:
    engine.load_checkpoint("checkpoints")
    losses = []
    while engine.global_steps < end:
        losses += train(engine, 1)
        engine.save_checkpoint("checkpoints")
    return losses


@pytest.mark.parametrize(("stage", "fused"), [(2, False), (3, False), (2, True), (3, True)])
def test_deepspeed_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path, stage: int, fused: bool) -> None:
    settings = config(stage, "bf16")
    settings["optimizer"]["params"]["torch_adam"] = not fused

    def trained(name: str, *ends: int) -> list[list[str]]:
        there = cluster.address, str(tmp_path / name)
        parts = [run(tmp_path / f"{name}{end}", 2, *there, settings, resume, end) for end in ends]
        return [list(itertools.chain(*losses)) for losses in zip(*parts, strict=True)]

    assert trained("halved", 2, 5) == trained("whole_", 5)
    assert [version.step for version in raystow.open(tmp_path / "halved").versions()] == [1, 2, 3, 4, 5]


def save_by(engine: Any) -> None:
    train(engine, 1)
    engine.save_checkpoint("checkpoints")


def load_weights_by_another(engine: Any) -> str:
    with pytest.raises(raystow.StateError, match="use the optimizer of the save") as refused:
        engine.load_checkpoint("checkpoints")
    path, _ = engine.load_checkpoint("checkpoints", load_optimizer_states=False)
    assert path is not None
    return str(refused.value)


def test_another_optimizer_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """FusedAdam counts steps in its groups, others at each parameter."""
    there, settings = (cluster.address, str(tmp_path / "run")), config(2, "bf16")
    run(tmp_path / "a", 1, *there, settings, save_by)
    settings["optimizer"]["params"]["torch_adam"] = False
    [refused] = run(tmp_path / "b", 1, *there, settings, load_weights_by_another)
    assert "FusedAdam loads only what FusedAdam has saved" in refused
    assert "only this optimizer counts steps in its groups: optim.param_groups.0.step" in refused


def load_other_groups(engine: Any) -> tuple[str, bool]:
    """Return the error, and whether the weights and their steps are as before."""

    def digest() -> list[Any]:
        state = engine.optimizer.optimizer.state
        return [[p.tolist() for p in engine.module.parameters()], [int(of["step"]) for of in state.values()]]

    train(engine, 3)
    before = digest()
    with pytest.raises(raystow.StateError) as refused:
        engine.load_checkpoint("checkpoints")
    return str(refused.value), digest() == before


def test_other_groups_are_refused_before_anything_is_written(cluster: Cluster, tmp_path: Path) -> None:
    there = cluster.address, str(tmp_path / "run")
    run(tmp_path / "a", 1, *there, config(2, "bf16"), save_by)
    [(refused, same)] = run(tmp_path / "b", 1, *there, {**config(2, "bf16"), "groups": 2}, load_other_groups)
    assert re.search(r"the optimizer's groups have \[\d+, \d+\] parameters, but the version holds groups of \[\d+\]", refused)
    assert same


class RecordedFences(raystow.Checkpointer):
    """Records in ``seen`` a digest of the weights at each call of ``fence``."""

    def fence(self) -> None:
        self.seen.append(digests(self.engine)["up.weight.master"])
        super().fence()


def fenced(rank: int, n: int, address: str, uri: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    engine = engine_of(rank, n, config(2, "bf16"))
    train(engine, 3)  # the learning rate starts at 0
    checkpointer = RecordedFences(uri)
    checkpointer.engine, checkpointer.seen = engine, []
    with pytest.raises(raystow.StateError, match="retention cannot be given with a Checkpointer"):
        raystow.deepspeed.attach(engine, checkpointer, retention=None)
    with raystow.deepspeed.attach(engine, checkpointer):
        before = digests(engine)["up.weight.master"]
        train(engine, 1)
        assert checkpointer.seen == [before], "not once, or not before the weights change"
        assert digests(engine)["up.weight.master"] != before


def test_the_optimizer_step_fences(cluster: Cluster, tmp_path: Path) -> None:
    with new_ranks(tmp_path / "a") as ranks:
        ranks.call(1, fenced, cluster.address, str(tmp_path / "run"))


def restore_in_torch(rank: int, n: int, uri: str, tag: str) -> dict[str, torch.Tensor]:
    """Restore the weights and a moment with FSDP2, through raystow and through torch.distributed.checkpoint, and return them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for way in ("raystow", "dcp"):
        model = fully_shard(Net(), mesh=init_device_mesh("cpu", (n,), mesh_dim_names=(tag + way,)))
        weights, moments = get_state_dict(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
        into = {"master": {name: weights[name] for name, p in model.named_parameters() if p.requires_grad}, "optim": moments}
        if way == "raystow":
            raystow.restore(uri, into, strict=False)
        else:
            dcp.load(into, storage_reader=raystow.dcp.Reader(uri))
        found[f"{way} master.up.weight"] = into["master"]["up.weight"].full_tensor()
        found[f"{way} optim.state.down.weight.exp_avg"] = moments["state"]["down.weight"]["exp_avg"].full_tensor()
    return found


def test_fsdp2_and_dcp_restore_whole_tensors(cluster: Cluster, tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    run(tmp_path / "a", 3, cluster.address, uri, config(3, "bf16"), save, 2)
    version = raystow.latest(uri)
    assert version is not None
    assert version.tensors()["master.up.weight"].shape == (WIDTH, 13)
    assert torch.equal(version.read("master.up.weight").bfloat16(), version.read("model.up.weight"))
    with new_ranks(tmp_path / "b") as ranks:
        for found in ranks.call(2, restore_in_torch, uri, "deepspeed"):
            for name, tensor in found.items():
                assert torch.equal(tensor, version.read(name.split()[1])), name


def attach_twice(engine: Any) -> None:
    raystow.deepspeed.attach(engine, "nowhere")


def load_weights(engine: Any) -> None:
    engine.load_checkpoint("checkpoints", load_module_only=True)


def save_tags(engine: Any) -> None:
    for epoch, tag in ((1, "regular"), (2, "best")):
        train(engine, 1)
        engine.save_checkpoint("checkpoints", tag=tag, client_state={"epoch": epoch}, save_latest=tag == "regular")


def load_tags(engine: Any) -> list[Any]:
    found = []
    for options in ({}, {"tag": "best", "load_module_only": True}, {"load_dir": "others"}):
        path, client_state = engine.load_checkpoint(**{"load_dir": "checkpoints", **options})
        found.append((path[-2:], client_state, engine.global_steps))
    with pytest.raises(NotFound, match="there is no checkpoint checkpoints/bset"):
        engine.load_checkpoint("checkpoints", tag="bset")
    return found


def test_tags_load_as_in_deepspeed(cluster: Cluster, tmp_path: Path) -> None:
    there = cluster.address, str(tmp_path / "run"), config(2, "bf16")
    run(tmp_path / "a", 1, *there, save_tags)
    [found] = run(tmp_path / "b", 1, *there, load_tags)
    assert found == [("#1", {"epoch": 1}, 1), ("#2", {"epoch": 2}, 1), ("#1", {"epoch": 1}, 1)]


def attach_with_super_offload(engine: Any) -> None:
    del engine.save_checkpoint  # no longer attached
    engine.super_offload = lambda: True
    raystow.deepspeed.attach(engine, "nowhere")


def save_without_weights(engine: Any) -> None:
    train(engine, 1)
    offload(engine, "lp_params")
    engine.save_checkpoint("checkpoints")


def test_unsupported_uses_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    with pytest.raises(RankFailed, match="the engine does not use ZeRO 1, 2 or 3"):
        run(tmp_path / "a", 1, cluster.address, uri, config(0, "fp32"), save, 1)
    with pytest.raises(RankFailed, match="the engine is attached already"):
        run(tmp_path / "b", 1, cluster.address, uri, config(1, "fp32"), attach_twice)
    with pytest.raises(RankFailed, match="the engine uses SuperOffload"):
        run(tmp_path / "e", 1, cluster.address, uri, config(1, "fp32"), attach_with_super_offload)
    muon = {**config(2, "bf16"), "optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
    with pytest.raises(RankFailed, match="the engine uses Muon without ZeRO 3"):
        run(tmp_path / "f", 1, cluster.address, uri, muon, train, 0)
    with pytest.raises(RankFailed, match="the weights of the model are offloaded"):
        run(tmp_path / "d", 1, cluster.address, uri, config(2, "bf16"), save_without_weights)
    dcp.save({"model": Net().state_dict()}, storage_writer=raystow.dcp.Writer(uri))
    with pytest.raises(RankFailed, match=r"not saved: master\..*if raystow.deepspeed did not save it, restore before"):
        run(tmp_path / "c", 1, cluster.address, uri, config(1, "fp32"), load_weights)


def test_the_example_resumes_with_another_stage(cluster: Cluster, tmp_path: Path) -> None:
    def printed(ranks: int, steps: int, stage: int) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launch, str(EXAMPLE), str(tmp_path / "run"), str(steps), str(stage)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "RAY_ADDRESS": cluster.address}
        ).stdout

    assert "rank 1 of 2, ZeRO 2: loaded None, step 0" in printed(2, 2, 2)
    assert re.search(r"rank 0 of 1, ZeRO 3: loaded \S+#2, step 2", printed(1, 3, 3))
