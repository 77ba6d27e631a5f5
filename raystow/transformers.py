"""For Hugging Face's ``Trainer``: hand a ``Checkpointing`` to ``Trainer(callbacks=...)``."""

from .orchestrator.integrations.transformers import Checkpointing

__all__ = ["Checkpointing"]
