"""For training functions of Ray Train: a ``Checkpointer`` of whose versions Train knows, and what to do with the checkpoints that
Train gives: ``version_of``, ``restore``, ``prune``."""

from .orchestrator.integrations.ray_train import Checkpointer, prune, restore, version_of

__all__ = ["Checkpointer", "prune", "restore", "version_of"]
