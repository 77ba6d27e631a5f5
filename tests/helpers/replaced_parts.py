"""Parts of a device, a driver, Ray or a class that a test replaces by fakes, as a table."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def replace_parts(patch: pytest.MonkeyPatch, parts: Iterable[tuple[object, str, object]]) -> None:
    """Replace parts until the patch is undone: each by its owner and name."""
    for owner, name, part in parts:
        patch.setattr(owner, name, part)
