"""The command line. It prints; nothing else in raystow does."""

from .app import main

__all__ = ["main"]
