"""The fixture ``store``, parametrized over every store of raystow."""

from __future__ import annotations

from pathlib import Path

import pytest

from raystow.storage.object_store import ObjectStore
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3), "az", "gs"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty store."""
    if request.param == "memory":
        return f"memory://t-{SYSTEM.token()}"
    if request.param == "local":
        return (tmp_path / "a repository" / "run").as_uri()
    return str(request.getfixturevalue(f"{request.param}_uri"))


@pytest.fixture
def store(uri: str) -> ObjectStore:
    """Return an empty store."""
    return open_store(uri)
