"""The lineage of a repository: runs, resumes, rollbacks and forks."""

from __future__ import annotations

from dataclasses import replace

from helpers.builders import empty_record, memory_repository

from raystow.cli.lineage import graph, lineage
from raystow.cli.target import Target
from raystow.storage.commit.committer import Committer
from raystow.storage.repository import Repository


def committed(repository: Repository, step: int, **origin: str) -> int:
    committer = Committer(repository, "test", None)
    return committer.commit(replace(empty_record(committer, step), provenance=origin)).id


def drawn(repository: Repository) -> list[str]:
    versions = lineage(Target(repository, repository.root()))
    return [line if one is None else f"{line} {one.version.id}" for line, one in graph(versions)]


def parents(repository: Repository) -> dict[int, tuple[int | None, bool]]:
    versions = lineage(Target(repository, repository.root()))
    return {one.version.id: (one.parent, one.begins) for one in versions}


def test_a_run_and_its_resume_are_one_line() -> None:
    repository = memory_repository()
    for step, origin in enumerate([{"run": "a"}, {"run": "a"}, {"run": "b", "resumed": "2"}, {"run": "b", "resumed": "2"}]):
        committed(repository, step, **origin)
    assert parents(repository) == {1: (None, True), 2: (1, False), 3: (2, True), 4: (3, False)}
    assert drawn(repository) == ["* 4", "* 3", "* 2", "* 1"]


def test_runs_from_one_version_are_a_fork() -> None:
    repository = memory_repository()
    committed(repository, 1, run="a")
    committed(repository, 2, run="b", resumed="1")
    committed(repository, 2, run="c", resumed="1")
    committed(repository, 3, run="b", resumed="1")
    committed(repository, 2, run="d", resumed="1")
    assert parents(repository) == {1: (None, True), 2: (1, True), 3: (1, True), 4: (2, False), 5: (1, True)}
    assert drawn(repository) == ["* 5", "| * 4", "| | * 3", "| * | 2", "|-/-/", "* 1"]


def test_a_restore_within_a_run_is_a_fork() -> None:
    repository = memory_repository()
    for resumed in ({}, {}, {"resumed": "1"}, {"resumed": "1"}):
        committed(repository, 1, run="a", **resumed)
    assert parents(repository) == {1: (None, True), 2: (1, False), 3: (1, True), 4: (3, False)}


def test_versions_without_provenance_follow_the_root() -> None:
    repository = memory_repository()
    for step in (1, 2, 3):
        committed(repository, step)
    repository.rollback(1)
    committed(repository, 2)
    assert {id: parent for id, (parent, _) in parents(repository).items()} == {1: None, 2: 1, 3: 2, 4: 1}
    assert drawn(repository) == ["* 4", "| * 3", "| * 2", "|-/", "* 1"]


def test_a_version_whose_parent_was_dropped_ends_its_line() -> None:
    repository = memory_repository()
    committed(repository, 9, run="b", resumed="77")
    committed(repository, 1, run="c")
    assert parents(repository) == {1: (77, True), 2: (None, True)}
    assert drawn(repository) == ["* 2", "* 1"]


def test_a_hostile_parent_is_none() -> None:
    repository = memory_repository()
    committed(repository, 1, run="a", resumed="-3")
    assert parents(repository) == {1: (None, True)}
