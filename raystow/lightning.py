"""PyTorch Lightning: the callback ``Checkpointing`` for ``Trainer(callbacks=...)``."""

from .storage import extras

with extras.named(), extras.tried("lightning", "2.6"):
    from .integrations.lightning import Checkpointing

__all__ = ["Checkpointing"]
