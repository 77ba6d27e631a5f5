"""torchft: replicas catch up from a state that a living one has staged in its node's memory."""

from .transport import CheckpointTransport

__all__ = ["CheckpointTransport"]
