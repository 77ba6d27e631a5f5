"""A ``Checkpointer`` for Ray Train that reports every version to Train, so that both keep the same versions.

Train's checkpoints are pointers to versions: folders with one small file, which Train lists, scores, validates and drops.
"""

from .checkpointer import Checkpointer
from .pointer import restore, version_of
from .result import prune

__all__ = ["Checkpointer", "prune", "restore", "version_of"]
