"""The fixtures ``gpu``, a simulated device, and ``interpreted``, which needs none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raystow.workers.gpu.kernels.library import Kernel


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a simulated device with the seed that the test passes."""
    from streams.encoder_run import streams

    with streams(request.param) as device:
        yield device


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels immediately, in Triton's interpreter."""
    from helpers.replaced_parts import replace_parts

    from streams.device import interpret

    replace_parts(monkeypatch, [(Kernel, "launch", interpret)])
