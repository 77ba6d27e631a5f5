"""DeepSpeed: ``attach`` makes ``engine.save_checkpoint`` and ``engine.load_checkpoint`` save and restore versions."""

from .storage import extras

with extras.named(), extras.tried("deepspeed", "0.19"):
    from .integrations.deepspeed import attach

__all__ = ["attach"]
