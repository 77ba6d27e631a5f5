"""For training functions of Ray Train: a ``Checkpointer`` that tells Train of every version, so that both always keep the same.

Train gets a pointer for each version, a folder with one small file; what it lists, scores, validates and drops are pointers.
"""

from .checkpointer import Checkpointer
from .pointer import restore, version_of
from .result import prune

__all__ = ["Checkpointer", "prune", "restore", "version_of"]
