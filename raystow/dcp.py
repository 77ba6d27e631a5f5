"""torch.distributed.checkpoint: a ``Writer`` for ``save`` and ``async_save``, a ``Reader`` for ``load``."""

from .orchestrator.integrations.dcp import Reader, Writer

__all__ = ["Reader", "Writer"]
