"""torch.distributed.checkpoint: a ``Writer`` for ``save`` and ``async_save``, a ``Reader`` for ``load``."""

from .storage import extras

with extras.named():
    from .integrations.dcp import Reader, Writer

__all__ = ["Reader", "Writer"]
