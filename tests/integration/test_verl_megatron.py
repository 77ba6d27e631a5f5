"""``raystow.verl`` with verl's checkpoint manager for Megatron, on CPU ranks that train a small GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster

import raystow

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")
pytest.importorskip("verl", reason="make test-frameworks installs verl, too, in the environment of Megatron-Core")

from integration.megatron_ranks import Layout, Training, run, whole

STEP = 2


def manager(training: Training, **options: Any) -> Any:
    """Make verl's manager as its engine does with the default configuration, except that no bridge to Hugging Face is there."""
    from omegaconf import OmegaConf
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    import raystow.verl

    assert raystow.verl
    megatron = {"dist_ckpt_optim_fully_reshardable": False, "distrib_optim_fully_reshardable_mem_efficient": False}
    return MegatronCheckpointManager(
        config=OmegaConf.create({"model": {"path": ""}, "megatron": megatron}),
        checkpoint_config=OmegaConf.create({"async_save": False}),
        model_config=None,
        transformer_config=training.model[0].config,
        role="actor",
        model=training.model,
        arch="GPTModel",
        hf_config=None,
        param_dtype=training.layout.dtype,
        share_embeddings_and_output_weights=True,
        processing_class=None,
        optimizer=training.optimizer,
        optimizer_scheduler=None,
        use_distributed_optimizer=training.layout.sharded,
        use_dist_checkpointing=True,
        **options,
    )


def save(training: Training, root: Path) -> tuple[Any, list[str]]:
    """Train, save as verl's trainer does, and train on while the save is in flight."""
    made = manager(training)
    training.train(STEP)
    found = training.parts()
    folder = root / f"global_step_{STEP}"
    weights = [buffer.param_data for chunk in training.model for buffer in chunk.buffers if buffer.param_data is not None]
    for one in weights:
        one.cpu_data = one.clone()  # as verl marks weights that it moves to host memory between its phases
    made.save_checkpoint(str(folder / "actor"), global_step=STEP)
    for one in weights:
        one.fill_(torch.nan)  # verl has freed them

    from raystow.integrations.verl.settings import repository_of
    from raystow.integrations.verl.training_process import PROCESS, Commit

    PROCESS.commit(Commit(repository_of(str(root)), STEP, ("actor",), folder))
    for one in weights:
        one.copy_(one.cpu_data)
    losses = training.train(2)
    PROCESS.close()
    return found, losses


def load(training: Training, root: Path, steps: int) -> tuple[Any, list[str]]:
    made = manager(training)

    from raystow.integrations.verl.trainers import find_latest_ckpt_path

    folder = find_latest_ckpt_path(str(root))
    made.load_checkpoint(f"{folder}/actor", del_local_after_load=False)
    training.step_number = STEP
    return training.parts(), training.train(steps)


@pytest.mark.long
@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_verls_megatron_manager_resumes_in_any_layout(cluster: Cluster, tmp_path: Path, sharded: bool) -> None:
    layout = Layout(tp=2, sharded=sharded)
    saved = run(tmp_path / "a", cluster.address, layout, save, tmp_path)
    state = whole([found for found, _ in saved])
    resumed = run(tmp_path / "b", cluster.address, layout, load, tmp_path, 2, seed=2)
    assert whole([found for found, _ in resumed]) == state
    assert [losses for _, losses in resumed] == [losses[-4:] for _, losses in saved]
    moved = run(tmp_path / "c", cluster.address, Layout(dp=2, sharded=sharded), load, tmp_path, 0, seed=3)
    assert whole([found for found, _ in moved]) == state
    (version,) = raystow.open(tmp_path / "raystow").versions()
    assert version.step == STEP
    names = {name.removesuffix(".word_embeddings.weight") for name in version.tensors()}
    assert {
        "actor.model.embedding",
        "actor.optimizer.optimizer.state.exp_avg.embedding",
        "files.actor/ckpt_contents.json",
    } <= names
