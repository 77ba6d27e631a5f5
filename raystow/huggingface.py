"""Hugging Face Trainer: the callback ``Checkpointing`` for ``Trainer(callbacks=...)``."""

from .storage import extras

with extras.named(), extras.tried("transformers", "5.24"):
    from .integrations.huggingface import Checkpointing

__all__ = ["Checkpointing"]
