"""A version is selected by its id, by a pin, by its step, as the latest one, or by a ``Version`` object."""

from __future__ import annotations

import pytest
from helpers.builders import empty_record, memory_repository

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import NotFound, StateError
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy
from raystow.storage.versions.version_selector import is_reserved, select, selector_text

STEPS = (10, 20, 20, 30)


@pytest.fixture
def repository() -> Repository:
    """Return a repository with versions 1 to 4; versions 2 and 3 are of step 20, and version 2 is pinned."""
    made = memory_repository()
    committer = Committer(made, "me")
    for step in STEPS:
        committer.commit(empty_record(committer, step))
    made.pin(made.version(2), "best")
    return made


@pytest.mark.parametrize(
    ("which", "id"),
    [(1, 1), ("1", 1), ("002", 2), ("best", 2), ("latest", 4), ("step:10", 1), ("step:20", 3), ("step:0030", 4)],
)
def test_every_form_selects_one_version(repository, which, id):
    assert repository.version(which).id == id


def test_a_version_selects_itself(repository):
    version = repository.version("best")
    assert repository.version(version) == version
    with pytest.raises(StateError, match=f"belongs to repository {repository.id}, not to "):
        memory_repository().version(version)


def test_a_version_of_another_repository_is_refused(repository):
    version = repository.version(1)
    other = memory_repository()
    committer = Committer(other, "me")
    assert committer.commit(empty_record(committer)).id == version.id
    for refused in (other.verify, lambda version: other.pin(version, "best"), lambda version: other.lease(version).__enter__()):
        with pytest.raises(StateError, match=f"belongs to repository {repository.id}, not to {other.id}"):
            refused(version)
        with pytest.raises(StateError, match=r"version is 1 \(give a raystow.Version, such as repository.version"):
            refused(1)
    assert other.root().pins == {}


@pytest.mark.parametrize("which", [None, True, -1, 1.0, "", "step:", "step:x", "step:-1", b"best", ["best"]])
def test_an_invalid_selector_is_refused(repository, which):
    with pytest.raises(StateError, match='give an id, the name of a pin, "step:60", "latest" or a Version'):
        repository.version(which)


@pytest.mark.parametrize(
    ("which", "what"),
    [
        (9, "there is no version 9"),
        ("bset", "there is no pin 'bset'"),
        ("step:25", "there is no version of step 25"),
        ("9" * 30, f"there is no pin '{'9' * 30}'"),
    ],
)
def test_the_error_states_the_selector_and_the_versions(repository, which, what):
    with pytest.raises(NotFound) as caught:
        repository.version(which)
    assert (caught.value.what, caught.value.subject) == (what, repository.uri)
    newest = "1 (step 10), 2 (step 20), 3 (step 20), 4 (step 30)"
    assert caught.value.remedy == f"the newest versions are {newest}, and pins are best; `raystow ls` lists all"


def test_the_error_states_that_the_version_was_dropped(repository):
    gone = repository.version(1)
    repository.plan_retention(Policy(keep_last=1)).execute()
    for which in (1, gone):
        with pytest.raises(NotFound, match="version 1 was dropped"):
            repository.version(which)


def test_the_error_lists_rolled_back_versions_of_the_step(repository):
    repository.pin(repository.version(4), "diverged")
    repository.rollback(1)
    assert [repository.version(which).id for which in (3, "best", "diverged", "latest")] == [3, 2, 4, 1]
    with pytest.raises(NotFound, match="there is no version of step 20; rolled-back ones are found by their ids: 2, 3"):
        repository.version("step:20")


def test_an_empty_repository_has_no_version_to_select():
    for which, what in (("latest", "there is no version yet"), (1, "there is no version 1"), ("best", "there is no pin 'best'")):
        with pytest.raises(NotFound, match=rf"{what} \(the first save creates a version\)"):
            memory_repository().version(which)


def test_equal_selectors_have_the_same_text(repository):
    version = repository.version(2)
    assert {selector_text(which, repository.id) for which in (2, "2", "02", version)} == {"2"}
    assert selector_text("step:020", repository.id) == "step:20"
    for which in (1, "best", "latest", "step:20", version):
        text = selector_text(which, repository.id)
        assert select(repository.root(), text, "") == select(repository.root(), which, "")


@pytest.mark.parametrize("name", ["latest", "7", "007", "step:7", "step:x"])
def test_a_reserved_pin_name_is_refused(repository, name):
    assert is_reserved(name)
    with pytest.raises(StateError, match="give a name that is no number"):
        repository.pin(repository.version(1), name)
    assert repository.root().pins == {"best": 2}


def test_a_rolled_back_version_is_found_by_id_and_pin_only(committer):
    repository = committer.catalog
    for step in (10, 20, 20):
        committer.commit(empty_record(committer, step))
    repository.pin(repository.version(3), "evidence")
    repository.rollback(2)
    assert [repository.version(which).id for which in (3, "3", "evidence", "latest", "step:20")] == [3, 3, 3, 2, 2]
    repository.rollback("step:10")
    with pytest.raises(NotFound, match="no version of step 20"):
        repository.version("step:20")
    repository.rollback("evidence")
    assert repository.version("latest").id == 3
