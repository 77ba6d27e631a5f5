"""A configuration of TorchTitan that saves to a repository. With this folder in PYTHONPATH on every node:

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_llama3 --config llama3_8b
"""

from __future__ import annotations

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from raystow.torchtitan import CheckpointManager


def llama3_8b() -> Trainer.Config:
    """Return TorchTitan's configuration with raystow's checkpoints."""
    config = config_registry.llama3_8b()
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        folder="s3://bucket/runs/llama",
        interval=500,
        keep_latest_k=3,
        async_mode="async",
    )
    return config
