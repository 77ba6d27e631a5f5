"""System calls that fail, are noted or do less than was asked, as the kernel may answer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest


class SystemCalls:
    """Replaces functions of ``os`` and ``fcntl`` until ``restore``, or until the test ends."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def replace(self, **functions: Callable[..., Any]) -> None:
        """Call these functions instead of those of the same names."""
        for name, function in functions.items():
            self._patch.setattr(os if hasattr(os, name) else fcntl, name, function)

    def fail(self, name: str, number: int) -> None:
        """Let the call fail with this errno."""

        def failed(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        self.replace(**{name: failed})

    def restore(self) -> None:
        """Bring all system calls back."""
        self._patch.undo()
