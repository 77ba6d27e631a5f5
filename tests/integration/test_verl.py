"""``raystow.verl`` with verl's trainers and checkpoint managers: killed trainings resume, with all parts at the same step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from helpers.polling import wait_until
from ray.cluster_utils import Cluster

import raystow
from integration.cli_runner import ran
from integration.gloo import _METHODS, RankFailed, Ranks
from raystow.storage import extras

pytest.importorskip("verl", reason="make test-frameworks installs verl in an environment of its own")

from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from integration import verl_sft, verl_toy, verl_workers
from integration.verl_toy import BATCH
from raystow.integrations.verl import install
from raystow.integrations.verl.settings import VARIABLE
from raystow.integrations.verl.step_folder import read_files
from raystow.integrations.verl.training_process import Commit, RoleState, TrainingProcess

_METHODS.set_forkserver_preload(["integration.verl_toy", "integration.verl_sft"])  # importing verl takes ten seconds


@pytest.fixture(scope="session")
def cluster(s3_bucket: str, cluster: Cluster) -> Cluster:
    """Return the shared cluster, started with the S3 server in its environment."""
    return cluster


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    """Return a function that calls a function on new processes: a process of verl has one repository and one world size."""

    groups = itertools.count()

    def call(n: int, what: Any, *args: Any) -> list[Any]:
        folder = tmp_path / f"group-{next(groups)}"
        folder.mkdir()
        processes = Ranks(folder)
        try:
            return processes.call(n, what, *args)
        finally:
            processes.close()

    return call


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    verl_sft.make_model(tmp_path / "run" / "model")
    return tmp_path / "run"


def notes(folder: Path) -> Counter[int]:
    return Counter(int(line) for path in folder.glob("notes-*") for line in path.read_text().split())


def clear_notes(folder: Path) -> None:
    for path in folder.glob("notes-*"):
        path.unlink()


def same(one: raystow.Version, other: raystow.Version) -> bool:
    names = [name for name in one.tensors() if not name.startswith("files.")]
    return one.step == other.step and all(torch.equal(one.read(name), other.read(name)) for name in names)


def test_killed_fine_tuning_resumes(cluster: Cluster, ranks: Any, run_folder: Path, tmp_path: Path) -> None:
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    ranks(2, verl_sft.fine_tune, cluster.address, whole, run_folder, 8)
    clear_notes(run_folder)
    with pytest.raises(RankFailed, match="rank 0 died"):
        ranks(2, verl_sft.fine_tune, cluster.address, killed, run_folder, 8, 5)
    clear_notes(run_folder)
    other = run_folder / "other-node"
    overrides = f"trainer.default_local_dir={other}", "trainer.max_ckpt_to_keep=2"  # without files of the first run
    ranks(2, verl_sft.fine_tune, cluster.address, killed, run_folder, 8, 0, *overrides)
    assert same(raystow.open(whole).latest(), raystow.open(killed).latest())
    [resumed_at] = [int(path.name.rpartition("_")[2]) for path in other.glob("version_*/global_step_*")]
    assert resumed_at in (2, 4)
    assert notes(run_folder).total() == (8 - resumed_at) * verl_sft.BATCH
    assert max(notes(run_folder).values()) == 1
    wait_until(
        lambda: [version.step for version in raystow.open(killed).versions()] == [6, 8], "the older versions to be dropped"
    )


@pytest.mark.parametrize(("saved", "restored"), [(2, 1), (1, 2)])
def test_other_world_sizes_resume(
    cluster: Cluster, ranks: Any, run_folder: Path, tmp_path: Path, saved: int, restored: int
) -> None:
    uri = str(tmp_path / "repository")
    ranks(saved, verl_sft.fine_tune, cluster.address, uri, run_folder, 4)
    [before] = [version for version in raystow.open(uri).versions() if version.step == 4]
    seen = notes(run_folder)
    ranks(restored, verl_sft.fine_tune, cluster.address, uri, run_folder, 8)
    after = raystow.open(uri).latest()
    assert (before.step, after.step, after.world_size) == (4, 8, restored)
    assert seen.total() == 4 * verl_sft.BATCH
    assert notes(run_folder) == Counter(range(verl_sft.PROMPTS))  # each prompt once
    assert int(after.read("optim.state.lm_head.weight.step")) == 8


@pytest.mark.s3
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["strategy=fsdp"], id="fsdp1"),
        pytest.param(["strategy=fsdp", "param_offload=true", "optimizer_offload=true"], id="fsdp1-offload"),
        pytest.param(["strategy=fsdp2", "param_offload=true", "optimizer_offload=true"], id="fsdp2-offload"),
    ],
)
def test_other_engines_resume_from_s3(cluster: Cluster, ranks: Any, run_folder: Path, s3_uri: str, engine: list[str]) -> None:
    whole, halves, options = f"{s3_uri}/whole", f"{s3_uri}/halves", [f"engine.{option}" for option in engine]
    ranks(2, verl_sft.fine_tune, cluster.address, whole, run_folder, 4, 0, *options)
    for steps in (2, 4):
        ranks(2, verl_sft.fine_tune, cluster.address, halves, run_folder, steps, 0, *options)
    first, second = raystow.open(halves).versions()
    assert (first.step, second.step) == (2, 4)
    assert not same(first, second)
    assert same(raystow.latest(whole), second)
    assert second.read("model.lm_head.weight").shape == (64, 64)
    assert int(second.read("optim.state.lm_head.weight.step")) == 4
    seen = notes(run_folder)
    assert (seen.total(), set(seen.values())) == (8 * verl_sft.BATCH, {2})  # both trainings had each prompt once


def test_weights_are_exported_to_hugging_face(cluster: Cluster, ranks: Any, run_folder: Path, tmp_path: Path) -> None:
    uri = str(tmp_path / "repository")
    ranks(2, verl_sft.fine_tune, cluster.address, uri, run_folder, 2, 0, "model.external_lib=verl_checkpoints")
    version = raystow.open(uri).latest()
    raystow.verl.write_files(version, str(tmp_path / "files"))
    ran("export", uri, "--hf", tmp_path / "hf", "--dtype", "bfloat16", "--files", tmp_path / "files" / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, version.read(f"model.{name}").to(torch.bfloat16))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").vocab_size == 64


class Killer:
    """Kills all ranks ``delay`` seconds after a file appears, or after their start if ``begun`` is None."""

    def __init__(self, processes: Ranks, begun: Path | None, delay: float) -> None:
        self._processes, self._begun, self._delay = processes, begun, delay
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while len(self._processes.members) < 2 or not (self._begun is None or self._begun.exists()):
            if self._over.wait(0.01):
                break
        self._over.wait(self._delay)
        for process, _ in list(self._processes.members):
            process.kill()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for process, _ in self._processes.members:
            process.join()


def check_parts(version: raystow.Version) -> None:
    """Assert that actor, critic and data loader are at the step of the version."""
    for role in ("actor", "critic"):
        seen = version.read(f"{role}.model.seen")
        assert (seen.sum(), seen.max()) == (version.step * BATCH, 1)
    content = io.BytesIO(version.read("files.data.pt").numpy().tobytes())
    data = torch.load(content, weights_only=True)  # noqa: TID251 (verl's own file)
    assert data["_num_yielded"] == version.step


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_no_prompt_is_skipped_or_trained_twice(cluster: Cluster, tmp_path: Path, kills: int) -> None:
    """Runs are killed and resumed until all of their prompts are trained; then the next run starts."""
    prompts, chance, begun, run_number = 80 * BATCH, np.random.default_rng(kills), tmp_path / "begun", itertools.count()
    processes, killed, versions, uri = Ranks(tmp_path), 0, set[tuple[str, int]](), ""
    try:
        [whole, _] = processes.call(2, verl_toy.train, cluster.address, str(tmp_path / "whole"), tmp_path, prompts, prompts)
        assert whole["actor"][0] == whole["critic"][0] == {1.0}
        while killed < kills or uri:
            uri = run = uri or str(tmp_path / f"run-{next(run_number)}")
            begun.unlink(missing_ok=True)
            awaited, delay = begun if chance.random() < 0.8 else None, chance.uniform(0, 1.5)
            killer = Killer(processes, awaited, delay) if killed < kills else None
            try:
                found = processes.call(2, verl_toy.train, cluster.address, uri, tmp_path, prompts)
            except (RankFailed, BrokenPipeError):
                if killer is None:
                    raise
                killed += 1
            else:
                assert [{**rank, "begin": 0} for rank in found] == [whole, whole]
                uri = ""
            finally:
                if killer is not None:
                    killer.end()
            with contextlib.suppress(raystow.NotARepository):
                for version in raystow.open(run).versions():
                    check_parts(version)
                    versions.add((run, version.id))
    finally:
        processes.close()
    assert versions
    print(f"{killed} kills in {next(run_number)} runs, {len(versions)} versions checked")


def test_ray_workers_save_one_version(cluster: Cluster, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl creates the critic's manager before it imports raystow.verl, and never imports raystow.verl in these workers."""
    uri = str(run_folder / "repository")
    monkeypatch.setenv(VARIABLE, uri)
    for step, change in ((1, 0.5), (2, 0.0)):
        groups = verl_workers.groups(run_folder / "model", 2)
        trainer = verl_toy.trainer_of(run_folder / "checkpoints", 100)
        trainer.actor_rollout_wg, trainer.critic_wg = groups["actor"], groups["critic"]
        trainer._load_checkpoint()
        assert trainer.global_steps == step - 1
        arguments = [verl_workers.change_weights] * 2, [change] * 2
        trainer.actor_rollout_wg.execute_all_sync("execute_with_func_generator", *arguments)
        trainer.global_steps = trainer.total_training_steps = step  # the last step waits until the version is durable
        trainer._save_checkpoint()
        for worker in groups["actor"].workers:
            ray.kill(worker)
    one, two = raystow.open(uri).versions()
    assert (one.step, two.step) == (1, 2)
    names = [name for name in one.tensors() if not name.startswith("files.")]
    assert {name.partition(".")[0] for name in names} == {"actor", "critic"}
    assert all(torch.equal(one.read(name), two.read(name)) for name in names)
    assert {"files.data.pt", "files.actor/huggingface/config.json"} <= one.tensors().keys()


def test_trainers_that_are_imported_later_save_versions(cluster: Cluster, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from integration import verl_cpu
from torch import distributed
import raystow.verl
assert not any(name.startswith("verl.trainer.ppo") for name in sys.modules)
from integration import verl_toy
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
verl_toy.train(0, 1, sys.argv[1], sys.argv[2], Path(sys.argv[3]), 4 * verl_toy.BATCH)
"""
    uri = str(tmp_path / "repository")
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", script, cluster.address, uri, str(tmp_path / "run")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=120)
    versions = raystow.open(uri).versions()
    assert [version.step for version in versions] == [2, 4]
    for version in versions:
        check_parts(version)


def test_an_api_that_has_changed_names_the_tried_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_checkpoint(self: object, path: str) -> None: ...

    monkeypatch.setattr(FSDPCheckpointManager, "save_checkpoint", save_checkpoint)
    with pytest.raises(raystow.Unsupported, match=r"has other parameters.*tried with verl 0\.9"), extras.tried("verl", "0.9"):
        install.__wrapped__()  # the cached call has succeeded in this process


def test_a_save_that_no_trainer_commits_is_refused() -> None:
    process = TrainingProcess()
    part = RoleState("actor", 1, {}, torch.nn.Linear(1, 1), torch.device("cpu"), None, None)
    process.add(part)
    with pytest.raises(raystow.StateError, match=r"step 1.*does not finish its saves"):
        process.add(dataclasses.replace(part, step=2))
    with pytest.raises(raystow.StateError, match=r"critic.*external_lib"):
        process.commit(Commit("/nowhere", 1, ("actor", "critic"), Path()))


def test_verl_itself_saves_outside_of_steps(ranks: Any, tmp_path: Path) -> None:
    """No trainer completes such a save, so it could not become part of a version."""
    elsewhere = tmp_path / "elsewhere"
    first, second = ranks(2, verl_toy.save_elsewhere, elsewhere)
    assert first == ([f"{elsewhere} is in no folder global_step_N: verl itself saves it, and raystow does not"], True)
    assert second == ([], True)
    assert len(list(elsewhere.glob("model_world_size_2_rank_*.pt"))) == 2


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a//b", "a/./b"])
def test_file_names_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    version = types.SimpleNamespace(tensors=lambda: {f"files.{name}": None})
    with pytest.raises(raystow.Damaged, match="not relative"):
        raystow.verl.write_files(version, tmp_path)


def test_links_that_leave_the_step_folder_are_refused(tmp_path: Path) -> None:
    step, content = tmp_path / "global_step_1", types.SimpleNamespace(numpy=lambda: np.frombuffer(b"new", np.uint8))
    (step / "real").mkdir(parents=True)
    (tmp_path / "private").write_text("private")
    (step / "a.json").symlink_to(tmp_path / "private")
    with pytest.raises(raystow.StateError, match=r"a\.json: .*leads out of its folder"):
        read_files(step)
    (step / "a.json").unlink()
    (step / "folder").symlink_to(tmp_path)
    version = types.SimpleNamespace(tensors=lambda: {"files.folder/private": None}, read=lambda name: content)
    with pytest.raises(raystow.StateError, match="leads out of its folder"):
        raystow.verl.write_files(version, step)
    assert (tmp_path / "private").read_text() == "private"
    (step / "b.json").symlink_to(tmp_path / "private")  # the link itself is replaced
    version.tensors = lambda: {"files.b.json": None}
    raystow.verl.write_files(version, step)
    assert ((step / "b.json").read_text(), (tmp_path / "private").read_text()) == ("new", "private")
