"""A repository in memory with three versions and a clock that does not advance."""

from __future__ import annotations

import pytest
from helpers.fake_clock import FakeClock
from helpers.scripted_store import ScriptedStore
from helpers.training_versions import mixed

from raystow.storage.commit.committer import Committer
from raystow.storage.format.root import Root
from raystow.storage.repository import Repository
from raystow.storage.stores.memory import MemoryStore


@pytest.fixture
def clock() -> FakeClock:
    made = FakeClock()
    made.time = 1e9
    return made


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return ScriptedStore("thinning", clock=clock)


@pytest.fixture
def repository(store: MemoryStore, clock: FakeClock) -> Repository:
    made = Repository(store, "0" * 32, clock=clock)
    made.register.create(Root(repository=made.id))
    return made


@pytest.fixture
def committer(repository: Repository) -> Committer:
    made = Committer(repository, "me")
    for step in (1, 2, 3):
        mixed(made, step)
    return made
