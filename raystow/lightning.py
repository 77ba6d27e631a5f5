"""For PyTorch Lightning: hand a ``Checkpointing`` to ``Trainer(callbacks=...)``."""

from .orchestrator.integrations.lightning import Checkpointing

__all__ = ["Checkpointing"]
