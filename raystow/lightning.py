"""PyTorch Lightning: the callback ``Checkpointing`` for ``Trainer(callbacks=...)``."""

from .orchestrator.integrations.lightning import Checkpointing

__all__ = ["Checkpointing"]
