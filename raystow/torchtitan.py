"""TorchTitan: a ``CheckpointManager`` that takes the place of TorchTitan's own."""

from .storage import extras

with extras.named(), extras.tried("torchtitan", "0.3"):
    from .orchestrator.integrations.torchtitan import CheckpointManager

__all__ = ["CheckpointManager"]
