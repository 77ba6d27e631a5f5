"""Ray Train: a ``Checkpointer`` that reports each version to Train, and functions for the checkpoints that Train returns."""

from .storage import extras

with extras.named(), extras.tried("ray", "2.60"):
    from .integrations.ray_train import Checkpointer, prune, restore, version_of

__all__ = ["Checkpointer", "prune", "restore", "version_of"]
