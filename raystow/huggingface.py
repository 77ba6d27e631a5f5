"""Hugging Face Trainer: the callback ``Checkpointing`` for ``Trainer(callbacks=...)``."""

from .orchestrator.integrations.huggingface import Checkpointing

__all__ = ["Checkpointing"]
