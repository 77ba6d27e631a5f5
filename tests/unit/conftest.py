"""Fixtures of the unit tests. A module that needs another repository, or a committer with versions, defines its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from helpers.builders import memory_repository
from helpers.replaced_parts import replace_parts

from raystow.storage.commit.committer import Committer
from raystow.storage.repository import Repository
from raystow.workers.gpu.encode import pinned_ring


@pytest.fixture
def repository() -> Repository:
    """Return a new repository in memory."""
    return memory_repository()


@pytest.fixture
def committer(repository: Repository) -> Committer:
    """Return a committer without commits."""
    return Committer(repository, "me")


@pytest.fixture(scope="module")
def host_copies() -> Iterator[None]:
    """Let pinned rings copy from host memory, immediately."""
    with pytest.MonkeyPatch.context() as patch:
        replace_parts(patch, [(pinned_ring, "copy_to_host", ctypes.memmove)])
        yield
