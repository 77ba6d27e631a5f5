"""torchft: a ``CheckpointTransport`` that heals replicas from the memory of a living one's node."""

from .storage import extras

with extras.named(), extras.tried("torchft", "0.2"):
    from .orchestrator.integrations.torchft import CheckpointTransport

__all__ = ["CheckpointTransport"]
