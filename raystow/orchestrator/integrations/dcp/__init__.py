"""A plug-in for ``torch.distributed.checkpoint`` (DCP), for process groups with or without Ray. It needs no node worker and no
coordinator: the writing processes code and upload, and DCP's coordinator rank commits.

DCP pickles what is not a tensor. Nothing here does: plain values are stored as raystow's own, all else is refused by name.
"""

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
