"""DeepSpeed engines with ZeRO 1, 2 and 3: tensors are stored by parameter, so any stage and number of ranks restores them."""

from .attach import attach

__all__ = ["attach"]
