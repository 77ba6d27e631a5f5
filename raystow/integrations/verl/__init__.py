"""verl: its FSDP checkpoint manager and trainers save versions, of which one has the actor, the critic and the data loader."""

from .install import install
from .settings import configure
from .step_folder import write_files

__all__ = ["configure", "install", "write_files"]
