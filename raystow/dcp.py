"""For ``torch.distributed.checkpoint``: hand a ``Writer`` to its ``save`` and ``async_save``, a ``Reader`` to its ``load``."""

from .orchestrator.integrations.dcp import Reader, Writer

__all__ = ["Reader", "Writer"]
