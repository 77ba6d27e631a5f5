"""``Run``: a training loop that resumes where it was."""

from .run import Run

__all__ = ["Run"]
