"""``raystow.megatron`` with real GPTs: every layout restores the saves of every other, bit for bit."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster

import raystow

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")

from helpers.polling import wait_until
from helpers.s3_server import free_port

from integration.megatron_ranks import Layout, Training, inner_optimizers, new_ranks, replace_cuda, run, whole

SCRIPT = Path(__file__).with_name("megatron_pretrain.py")


def save(training: Training, uri: str, steps: int = 2) -> tuple[Any, list[str]]:
    """Train, save, and train on while the save is in flight."""
    import raystow.megatron

    with raystow.Checkpointer(uri) as checkpointer:
        losses = training.train(steps)
        found = training.parts()
        raystow.megatron.save(checkpointer, training.state(), step=training.step_number)
        losses += training.train(2, before=checkpointer.fence)
    return found, losses


def load(training: Training, uri: str, steps: int = 0) -> tuple[Any, list[str]]:
    import raystow.megatron

    with raystow.Checkpointer(uri) as checkpointer:
        loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True))
        assert loaded is not None
        training.take(loaded)
        return training.parts(), training.train(steps)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp=2), id="data"),
        pytest.param(Layout(tp=2, sharded=False), id="tensors-mixed-precision"),
        pytest.param(Layout(tp=2), id="tensors", marks=pytest.mark.long),
        pytest.param(Layout(pp=2), id="pipeline", marks=pytest.mark.long),
        pytest.param(Layout(pp=2, chunks=2), id="virtual-stages", marks=pytest.mark.long),
        pytest.param(Layout(dp=2, ep=2, experts=4), id="experts", marks=pytest.mark.long),
    ],
)
def test_megatron_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path, layout: Layout) -> None:
    uri = str(tmp_path / "run")
    saved = run(tmp_path / "a", cluster.address, layout, save, uri)
    resumed = run(tmp_path / "b", cluster.address, layout, load, uri, 2, seed=2)
    assert whole([found for found, _ in resumed]) == whole([found for found, _ in saved])
    assert [losses for _, losses in resumed] == [losses[4:] for _, losses in saved]


def load_each(training: Training, uris: list[str]) -> list[Any]:
    """Load from each repository, and return the parts. The random generators of a layout are its own."""
    import raystow.megatron

    found = []
    for uri in uris:
        with raystow.Checkpointer(uri) as checkpointer:
            loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True, rng=False))
            training.take(loaded)
        found.append(training.parts())
    return found


def load_and_save(training: Training, old: str, new: str) -> None:
    import raystow.megatron

    load_each(training, [old])
    with raystow.Checkpointer(new) as checkpointer:
        raystow.megatron.save(checkpointer, training.state(), step=training.step_number)


def check_every_layout(cluster: Cluster, tmp_path: Path, saved: list[Layout], restored: list[Layout]) -> None:
    """Assert that each layout restores what each of the others has saved, bit for bit."""
    uris, expected = [], []
    for number, layout in enumerate(saved):
        uris.append(str(tmp_path / f"run-{number}"))
        expected.append(whole([found for found, _ in run(tmp_path / f"s{number}", cluster.address, layout, save, uris[-1])]))
    assert len({repr(one) for one in expected}) == len(expected)
    for number, layout in enumerate(restored):
        found = run(tmp_path / f"r{number}", cluster.address, layout, load_each, uris, seed=10 + number)
        for of_run, whole_run in enumerate(expected):
            assert whole([of_rank[of_run] for of_rank in found]) == whole_run


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        pytest.param(Layout(tp=2), Layout(dp=2), id="tensors-to-data"),
        pytest.param(Layout(pp=2), Layout(tp=2), id="pipeline-to-tensors"),
        pytest.param(Layout(pp=2, chunks=2), Layout(pp=2), id="virtual-stages"),
        pytest.param(Layout(dp=2, sharded=False), Layout(tp=2, sharded=False), id="mixed-precision"),
        pytest.param(Layout(dp=2, frozen=True), Layout(tp=2, frozen=True), id="frozen"),
        pytest.param(Layout(dp=2, dtype=torch.float32), Layout(tp=2, dtype=torch.float32), id="fp32"),
        pytest.param(Layout(dp=2, ep=2, experts=4), Layout(experts=4), id="experts"),
        pytest.param(Layout(experts=4), Layout(dp=2, ep=2, experts=4), id="to-experts"),
    ],
)
def test_another_layout_restores_every_bit(cluster: Cluster, tmp_path: Path, saved: Layout, restored: Layout) -> None:
    check_every_layout(cluster, tmp_path, [saved], [restored])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_every_layout_restores_every_other(cluster: Cluster, tmp_path: Path, sharded: bool) -> None:
    sizes = (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (1, 1, 4)
    layouts = [Layout(tp, pp, dp, sharded=sharded) for tp, pp, dp in sizes]
    check_every_layout(cluster, tmp_path, layouts, layouts)


def memory_of_saves(training: Training, uri: str) -> tuple[int, int]:
    """Save twice, and return the bytes that this rank has of the state, and by how much its memory has grown at the peak."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import raystow.megatron

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    training.train(1)
    state = training.state()
    with raystow.Checkpointer(uri) as checkpointer:
        small = ShardedTensor.from_rank_offsets("w", torch.ones(1), replica_id=torch.distributed.get_rank())
        raystow.megatron.save(checkpointer, {"w": small}, step=0).result()  # starts threads, and imports what saves need
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        for step in 1, 2:
            raystow.megatron.save(checkpointer, state, step=step).result()
        grown = resident("VmHWM") - before
    tensors = [parameter for chunk in training.model for parameter in chunk.parameters()]
    for inner in inner_optimizers(training.optimizer):
        tensors += [one for parameter, state in inner.state.items() for one in (parameter, *state.values()) if one.ndim]
    return sum(tensor.nbytes for tensor in tensors), grown


@pytest.mark.long
def test_a_save_needs_little_more_memory_than_a_rank_has(cluster: Cluster, tmp_path: Path) -> None:
    layout = Layout(dp=2, hidden=512, vocabulary=40_000)
    for shard, grown in run(tmp_path / "ranks", cluster.address, layout, memory_of_saves, str(tmp_path / "run")):
        assert shard > 200 << 20
        assert grown <= 1.2 * shard


def refusals(rank: int, n: int, address: str, uri: str) -> list[str]:
    """Save states that Megatron itself would store wrongly, and return the errors."""
    replace_cuda()
    import ray
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    import raystow.megatron

    ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)

    def sharded(name: str, replica: int = 0) -> Any:
        return ShardedTensor.from_rank_offsets(name, torch.full((2, 2), float(rank)), replica_id=replica)

    states = [
        {"model": {"w": sharded("decoder.layers.0.w")}},
        {"model": {"w": torch.full((2, 2), float(rank))}},
        {"rng": ShardedObject("rng", object() if rank else 1, (n,), (rank,))},
    ]
    found = []
    with raystow.Checkpointer(uri) as checkpointer:
        for state in states:
            with pytest.raises(raystow.StateError) as error:
                raystow.megatron.save(checkpointer, state, step=1)
            found.append(str(error.value))
        raystow.megatron.save(checkpointer, {"w": sharded("w", replica=rank)}, step=2).result()
    return found


def test_a_state_that_would_be_mixed_up_is_refused_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    with new_ranks(tmp_path / "ranks") as ranks:
        first, second = ranks.call(2, refusals, cluster.address, str(tmp_path / "run"))
    for errors in first, second:
        assert re.search("decoder.layers.0.w.*ranks 0 and 1 both store.*local to a pipeline stage", errors[0])
        assert "rank 1 has other plain tensors than rank 0" in errors[1]
    assert "rank 1 cannot save" in first[2]
    assert "object of class object cannot be stored" in second[2]
    assert list(raystow.latest(str(tmp_path / "run")).read("w").ravel()) == [0.0] * 4  # type: ignore[union-attr]


def pretrain(
    address: str, folder: Path, uri: object, *arguments: str, kill_after: Path | None = None, code: int = 0
) -> tuple[list[str], str]:
    """Run Megatron's own training loop on two ranks, and return the losses of rank 0 and its output. ``kill_after``: a file; all
    ranks are killed when it is there. ``code``: with which they end otherwise."""
    ranks, port, running = 2, free_port(), []
    for rank in range(ranks):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "RAY_ADDRESS": address, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, str(SCRIPT), str(uri), "--train-iters", "6", *arguments]
        with open(folder / f"output-{rank}", "w") as output:
            running.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output))
    if kill_after is not None:
        wait_until(lambda: kill_after.exists() or running[0].poll() is not None, f"there is {kill_after}", 300)
        for process in running:
            process.kill()
    codes = [process.wait(300) for process in running]
    outputs = [(folder / f"output-{rank}").read_text() for rank in range(ranks)]
    assert codes == [code if kill_after is None else -signal.SIGKILL] * ranks, outputs[0][-3000:] + outputs[-1][-3000:]
    return re.findall("^loss .*", outputs[0], re.MULTILINE), outputs[0]


@pytest.mark.long
def test_megatrons_loop_resumes_on_new_nodes(cluster: Cluster, tmp_path: Path) -> None:
    from raystow.integrations.megatron import plain_objects

    address, folder, uri = cluster.address, tmp_path / "checkpoints", tmp_path / "run"
    undisturbed, _ = pretrain(address, tmp_path, "")
    saving = ["--save", str(folder), "--save-interval", "2", "--async-save", "--use-persistent-ckpt-worker"]
    begun, _ = pretrain(address, tmp_path, uri, *saving, "--exit-interval", "4")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    shutil.rmtree(folder)  # it was on the disk of a node
    ended, output = pretrain(address, tmp_path, uri, *saving, "--load", str(folder))
    assert begun + ended == undisturbed
    assert "at iteration 4" in output
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["iter_0000004", "iter_0000006"]
    assert [version.step for version in raystow.open(uri).versions()] == [2, 4, 6]
    assert json.loads((folder / "iter_0000006" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = plain_objects.decode(raystow.open(uri).version("step:6").read("common_state"))
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_sharded_model_space"


@pytest.mark.slow
def test_megatrons_loop_resumes_after_its_ranks_were_killed(cluster: Cluster, tmp_path: Path) -> None:
    address, folder, uri = cluster.address, tmp_path / "checkpoints", tmp_path / "run"
    steps = ["--train-iters", "60"]
    undisturbed, _ = pretrain(address, tmp_path, "", *steps)
    saving = [*steps, "--save", str(folder), "--save-interval", "2", "--async-save", "--use-persistent-ckpt-worker"]
    begun, _ = pretrain(address, tmp_path, uri, *saving, kill_after=folder / "latest_checkpointed_iteration.txt")
    ended, output = pretrain(address, tmp_path, uri, *saving, "--load", str(folder))
    (first,) = re.findall(r"successfully loaded checkpoint .* at iteration (\d+)", output)
    assert begun == undisturbed[: len(begun)]
    assert ended == undisturbed[int(first) :]
    assert 0 < int(first) <= len(begun)


@pytest.mark.long
def test_megatrons_loop_loads_what_its_arguments_say(cluster: Cluster, tmp_path: Path) -> None:
    address, folder, uri = cluster.address, tmp_path / "checkpoints", tmp_path / "run"
    plain, tensors = ["--rerun-mode", "disabled"], ["--tensor-model-parallel-size", "2"]
    some = ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "global"]
    pretrain(address, tmp_path, uri, *plain, "--save", str(folder), "--save-interval", "2", "--exit-interval", "3", *some)
    load = [*plain, "--load", str(folder)]
    losses, output = pretrain(address, tmp_path, uri, *load, *tensors, "--exit-interval", "4", *some)
    assert "at iteration 3" in output  # which is not persistent
    assert {line.split()[1] for line in losses} == {"12"}, "the data goes on"
    asked = [*load, "--ckpt-step", "2", "--exit-interval", "4"]
    everything, output = pretrain(address, tmp_path, uri, *asked, "--dist-ckpt-strictness", "raise_all")
    assert "at iteration 2" in output
    weights, _ = pretrain(address, tmp_path, uri, *asked, "--no-load-optim")
    assert weights[0] == everything[0]
    assert weights[-1] != everything[-1]
    no_generators, _ = pretrain(address, tmp_path, uri, *asked, "--no-load-rng")
    assert no_generators[0] != everything[0]
    losses, output = pretrain(address, tmp_path, tmp_path / "another", *load, *tensors, "--finetune", "--exit-interval", "1")
    assert "at iteration 0" in output
    assert {line.split()[1] for line in losses} == {"0"}, "the data begins anew"


@pytest.mark.long
def test_megatrons_loop_loads_a_checkpoint_of_megatron(cluster: Cluster, tmp_path: Path) -> None:
    address, folder = cluster.address, tmp_path / "checkpoints"
    pretrain(address, tmp_path, "", "--save", str(folder), "--save-interval", "2", "--exit-interval", "2")
    load = ["--load", str(folder), "--exit-interval", "3"]
    expected, _ = pretrain(address, tmp_path, "", *load)
    losses, output = pretrain(address, tmp_path, tmp_path / "run", *load)
    assert "at iteration 2" in output
    assert losses == expected


@pytest.mark.long
def test_megatrons_loop_refuses_an_argument_before_it_trains(cluster: Cluster, tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2", "--save-retain-interval", "4"]
    losses, output = pretrain(cluster.address, tmp_path, tmp_path / "run", *saving, code=1)
    assert not losses
    assert "StateError: raystow.megatron: --save-retain-interval 4 is not supported" in output


def test_arguments_that_are_not_supported_are_refused_by_name() -> None:
    replace_cuda()
    from raystow.integrations.megatron.install import check_arguments

    check_arguments(argparse.Namespace(ckpt_format="torch_dist", non_persistent_ckpt_type="global", use_megatron_fsdp=False))
    for name, value in [
        ("ckpt_format", "fsdp_dtensor"),
        ("non_persistent_ckpt_type", "local"),
        ("save_retain_interval", 10),
        ("use_precision_aware_optimizer", True),
        ("dist_ckpt_strictness", "return_all"),
        ("logits_save_dir", "/logits"),
        ("moe_use_upcycling", True),
        ("gtp_weight_remat_size", 2),
    ]:
        with pytest.raises(raystow.StateError, match=f"--{name.replace('_', '-')} {value} is not supported"):
            check_arguments(argparse.Namespace(**{"ckpt_format": "torch_dist", name: value}))


def test_megatron_has_what_is_replaced() -> None:
    """Another release of Megatron fails here with the name of what has moved."""
    replace_cuda()
    from megatron.core import optimizer

    from raystow.integrations.megatron.install import REPLACED

    found = {module.__name__: names for module, names in REPLACED.items()}
    training = "megatron.training"
    assert found == {
        f"{training}.checkpointing": (
            "dist_checkpointing",
            "_build_sharded_state_dict_metadata",
            "_load_base_checkpoint",
            "checkpoint_exists",
        ),
        f"{training}.training": ("setup_model_and_optimizer",),
        f"{training}.initialize": ("init_persistent_async_worker",),
        f"{training}.async_utils": ("_async_calls_queue",),
    }
    for module, names in REPLACED.items():
        for name in names:
            assert hasattr(module, name), f"{module.__name__}.{name}"
    sharded = optimizer.DistributedOptimizer
    of_format = "sharded_param_state_fs_model_space", "load_parameter_state_from_fs_model_space"
    for name in ("sharded_state_dict", "load_state_dict", *of_format):
        assert vars(sharded)[name].__module__ == "raystow.integrations.megatron.distributed_optimizer", name
