"""Storage for ``torch.distributed.checkpoint`` (DCP), with or without Ray: processes code and upload, DCP's coordinator commits.

DCP pickles values that are not tensors. This package never does: plain values are stored in raystow's format, others are refused.
"""

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
