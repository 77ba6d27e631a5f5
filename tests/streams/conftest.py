"""Devices for tests that need none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device with the seed that the test gives."""
    from encoder_run import streams

    with streams(request.param) as device:
        yield device
