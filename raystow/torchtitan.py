"""TorchTitan: a ``CheckpointManager`` that takes the place of TorchTitan's own."""

from .storage import extras

with extras.named(), extras.tried("torchtitan", "0.3"):
    from .integrations.torchtitan import CheckpointManager

__all__ = ["CheckpointManager"]
