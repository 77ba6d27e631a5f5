"""Fixtures of the unit tests. A module that needs another repository, or a committer with versions, defines its own."""

from __future__ import annotations

import pytest
from builders import memory_repository

from raystow.storage.committer import Committer
from raystow.storage.repository import Repository


@pytest.fixture
def repository() -> Repository:
    """Return a new repository in memory."""
    return memory_repository()


@pytest.fixture
def committer(repository: Repository) -> Committer:
    """Return a committer without commits."""
    return Committer(repository, "me")
