"""verl's groups of Ray workers on CPUs: each process has a part of an actor and of a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from integration import verl_cpu

# Modules of verl import by name the functions that verl_cpu replaces.
# isort: split
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

assert verl_cpu
ROLES = ("actor", "critic")


class CpuWorker(TrainingWorker):
    """A worker whose process imports this module, and thus the platform, first."""


def groups(model: Path, n: int) -> dict[str, Any]:
    """Return the group of each role in ``n`` processes, created like in ``RayPPOTrainer.init_workers``: the critic first."""
    classes = {}
    for role in ROLES:
        eager = {"attn_implementation": "eager"}
        loaded = HFModelConfig(
            path=str(model), override_config=eager, use_remove_padding=False, enable_gradient_checkpointing=False
        )
        config = TrainingWorkerConfig(
            model_type="language_model",  # a value model needs flash attention
            model_config=loaded,
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, dtype="float32"),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
        classes[role] = RayClassWithInitArgs(cls=ray.remote(CpuWorker), config=config)
    pool = RayResourcePool([n], use_gpu=False, max_colocate_count=1)
    found = RayWorkerGroup(pool, create_colocated_worker_cls(classes), device_name="cpu").spawn(prefix_set=classes)
    for role in reversed(ROLES):
        found[role].reset()
    return found


def change_weights(worker: Any, by: float) -> None:
    """Change the weights of both roles in a worker process, as a training step would."""
    for of in worker.worker_dict.values():
        for weight in of.engine.module.parameters():
            weight.data.add_(by)
