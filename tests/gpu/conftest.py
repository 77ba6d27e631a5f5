"""The fixture ``folder``: in memory, so that no disk limits the speed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="raystow-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a killed node worker may still be writing
