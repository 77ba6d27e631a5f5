"""Megatron-Core: ``install`` makes its training loop save and load versions; ``save`` and ``load`` are for loops of one's own."""

from .storage import extras

with extras.named(), extras.tried("megatron.core", "0.19"):
    from .integrations.megatron import install, load, save

__all__ = ["install", "load", "save"]
