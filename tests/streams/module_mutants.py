"""Copies of modules with a planted bug, which the tests must detect."""

from __future__ import annotations

import types
from pathlib import Path


def rewritten(module: types.ModuleType, right: str, wrong: str) -> types.ModuleType:
    """Return the module with one passage of its source replaced."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(right) == 1, right
    made = types.ModuleType(module.__name__)
    made.__package__ = module.__package__
    exec(compile(text.replace(right, wrong), module.__file__, "exec"), made.__dict__)
    return made
