"""Hugging Face Trainer: the callback ``Checkpointing`` for ``Trainer(callbacks=...)``."""

from .storage import extras

with extras.named():
    from .orchestrator.integrations.huggingface import Checkpointing

__all__ = ["Checkpointing"]
