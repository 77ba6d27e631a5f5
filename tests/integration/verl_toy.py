"""A small PPO training of verl that counts in its weights how often each prompt was trained.

It uses verl's checkpoint managers and the methods of ``RayPPOTrainer`` that save and load. Each gloo rank acts as its own worker
groups.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from transformers import PretrainedConfig, PreTrainedModel
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import raystow.verl
from integration import verl_cpu
from raystow.integrations.verl.settings import VARIABLE

assert verl_cpu
assert raystow.verl

BATCH, LEARNED, KEPT = 4, 30_000, 2


class Counts(PreTrainedModel):
    """A model that counts in ``seen`` how often each prompt was trained; ``learned`` also depends on the order of the prompts."""

    config_class = PretrainedConfig

    def __init__(self, prompts: int, seed: int) -> None:
        super().__init__(PretrainedConfig())
        self.seen = nn.Parameter(torch.zeros(prompts))
        self.learned = nn.Parameter(torch.rand(LEARNED, generator=torch.Generator().manual_seed(seed)))

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        return -self.seen[prompts].sum() + (self.learned * (prompts.sum() % 7 - 3)).square().mean()


class Group:
    """The interface of a worker group of verl, implemented in this process with a checkpoint manager."""

    def __init__(self, manager: FSDPCheckpointManager) -> None:
        self._manager, self.world_size = manager, distributed.get_world_size()

    def save_checkpoint(self, local_path: str, hdfs_path: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        self._manager.save_checkpoint(local_path, hdfs_path, step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self._manager.load_checkpoint(local_path, None, del_local_after_load)

    def execute_all_sync(self, method: str, functions: list[Callable[..., None]], arguments: list[Any]) -> None:
        rank = distributed.get_rank()
        functions[rank](self, arguments[rank])


class Role:
    """The actor or the critic: its sharded model, optimizer and schedule."""

    def __init__(self, prompts: int, seed: int) -> None:
        self.model = Counts(prompts, seed)
        fully_shard(self.model)
        counted = {"params": [self.model.seen], "lr": float(distributed.get_world_size())}  # gradients are averaged
        self.optimizer = torch.optim.SGD([counted, {"params": [self.model.learned], "lr": 0.01, "momentum": 0.9}])
        constant = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.schedule = constant
        self.group = Group(FSDPCheckpointManager(self.model, self.optimizer, constant))

    def step(self, prompts: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(prompts).backward()
        self.optimizer.step()
        self.schedule.step()


def trainer_of(folder: Path, prompts: int) -> Any:
    """Return a ``RayPPOTrainer`` with only the attributes that its save and load methods use."""
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    options = {
        "default_local_dir": str(folder),
        "default_hdfs_dir": None,
        "resume_mode": "auto",
        "del_local_ckpt_after_load": False,
    }
    keeps = {"max_actor_ckpt_to_keep": KEPT, "max_critic_ckpt_to_keep": KEPT}
    checkpoint = {"actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}}}
    trainer.config = OmegaConf.create({"trainer": {**options, **keeps}, **checkpoint})
    trainer.use_critic, trainer.global_steps, trainer.total_training_steps = True, 0, prompts // BATCH
    shuffled = RandomSampler(range(prompts), generator=torch.Generator().manual_seed(1))
    trainer.train_dataloader = StatefulDataLoader(range(prompts), batch_size=BATCH, sampler=shuffled, drop_last=True)
    return trainer


def train(rank: int, n: int, address: str, uri: str, folder: Path, prompts: int, save_every: int = 2) -> dict[str, Any]:
    """Train each prompt once, starting at the newest version; create the file ``begun`` after each step."""
    os.environ[VARIABLE] = uri
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    folder.mkdir(exist_ok=True)
    own = folder / f"rank-{rank}"  # simulates nodes without a shared folder
    trainer, actor, critic = trainer_of(own, prompts), Role(prompts, 1), Role(prompts, 2)
    trainer.actor_rollout_wg, trainer.critic_wg = actor.group, critic.group
    trainer._load_checkpoint()
    begin = trainer.global_steps
    for batch in trainer.train_dataloader if begin < trainer.total_training_steps else ():
        trainer.global_steps += 1
        for role in (actor, critic):
            role.step(batch[rank::n])
        if trainer.global_steps % save_every == 0:
            trainer._save_checkpoint()
        (folder / "begun").touch()
    return {
        "begin": begin,
        "steps": trainer.global_steps,
        **{name: _found(role) for name, role in (("actor", actor), ("critic", critic))},
    }


def save_elsewhere(rank: int, n: int, folder: Path) -> tuple[list[str], bool]:
    """Save a role into a folder that is of no step, train, and load it. Return the warnings, and whether the weights are back."""
    role, warnings = Role(BATCH, 1), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raystow").addHandler(handler)
    saved = _found(role)
    role.group.save_checkpoint(str(folder), None, 1, None)
    role.step(torch.arange(BATCH))
    assert _found(role) != saved
    role.group.load_checkpoint(str(folder), False)
    return warnings, _found(role) == saved


def _found(role: Role) -> tuple[set[float], str]:
    """Return the set of training counts of the prompts, and a digest of the learned weights."""
    learned = role.model.learned.full_tensor().detach().numpy().tobytes()
    return set(role.model.seen.full_tensor().tolist()), hashlib.sha256(learned).hexdigest()
