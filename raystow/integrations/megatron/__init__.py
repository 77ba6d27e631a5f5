"""Megatron-Core: any layout restores the versions of any other, and nothing is gathered to save them."""

from .distributed_optimizer import replace_methods
from .install import install
from .sharded_checkpoint import load, save

replace_methods()

__all__ = ["install", "load", "save"]
