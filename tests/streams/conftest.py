"""The fixture ``gpu``: a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a simulated device with the seed that the test passes."""
    from streams.encoder_run import streams

    with streams(request.param) as device:
        yield device
