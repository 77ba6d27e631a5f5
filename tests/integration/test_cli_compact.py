"""Compaction of delta-encoded versions, by commands and by a run, so that retention can drop their bases."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.builders import orphans
from helpers.local_cluster import LocalCluster
from helpers.state_equality import restores

from integration import cli_runner
from integration.cli_runner import run_json
from integration.training_states import training
from raystow.dcp import Reader
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.policy import Policy

ran = functools.partial(cli_runner.ran, columns=100)

ROW = 4
STATES = list(itertools.islice(training(), 7))
POLICY = Policy(keep_last=1)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two bases: version 1 for versions 2 to 5, and version 6 for version 7. Version 3 is pinned."""
    folder = tmp_path_factory.mktemp("compact") / "run"
    with LocalCluster(str(folder), delta=ROW) as local:
        for step, state in enumerate(STATES):
            version = local.save(state, step=step)
            if step == 2:
                local.repository.pin(version, "good")
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def bases(repository: Repository) -> dict[int, tuple[int, ...]]:
    return {entry.id: entry.bases for entry in repository.root().versions}


def whole(repository: Repository) -> bool:
    repository.plan_collection(grace=0).execute()
    assert orphans(repository) == []
    for version in repository.versions():
        repository.verify(version)
    return all(restores(version, STATES[version.step]) for version in repository.versions())


def test_prune_compacts_a_kept_delta_to_drop_its_base(folder: Path) -> None:
    repository = open_repository(str(folder))
    rules = ("prune", folder, "--keep-last", 1, "--compact")
    dry = run_json(*rules, "--dry-run")
    assert {row["id"]: row["compact"] for row in dry["versions"] if row["keep"]} == {3: True, 6: False, 7: False}
    assert dry["versions"][2]["rules"] == ["pinned as good", "written whole, so that version 1 can go"]
    assert dry["versions"][0]["rules"] == ["no rule keeps it once version 3 is written whole"]
    assert (dry["compacted"], dry["dropped"]) == ([], [])
    without = run_json("prune", folder, "--keep-last", 1, "--dry-run")
    assert without["versions"][0]["keep"], "version 3 needs version 1"
    text = " ".join(ran(*rules, "--dry-run").stdout.split())
    assert "compact pinned as good; written whole, so that version 1 can go: about" in text
    assert "store 1 of these whole, about" in text
    done = run_json(*rules)
    assert (done["compacted"], done["dropped"]) == ([3], [1, 2, 4, 5])
    assert bases(repository) == {3: (), 6: (), 7: (6,)}
    assert whole(repository)
    assert abs(dry["versions"][2]["stored_whole"] - repository.version(3).bytes) < 0.05 * repository.version(3).bytes


def test_prune_text_reports_the_compacted_versions(folder: Path) -> None:
    text = " ".join(ran("prune", folder, "--keep-last", 1, "--compact", "--yes").stdout.split())
    assert "dropped 4 versions and stored 1 version whole, " in text
    assert "unchanged" not in text


def test_compact_rewrites_named_versions_and_drops_none(folder: Path) -> None:
    repository = open_repository(str(folder))
    text = " ".join(ran("compact", folder, 3, 7, "--dry-run").stdout.split())
    assert "whole" in text
    assert "keep is the newest" in text
    done = run_json("compact", folder, 3, 7)
    assert [(row["id"], row["bases"], row["compact"], row["why"]) for row in done["versions"]] == [
        (3, [1], True, ""),
        (7, [6], False, "is the newest"),
    ]
    assert done["compacted"] == [3]
    assert bases(repository) == {1: (), 2: (1,), 3: (), 4: (1,), 5: (1,), 6: (), 7: (6,)}
    assert repository.root().pins == {"good": 3}
    assert "stored 3 versions whole, " in " ".join(ran("compact", folder, "--yes").stdout.split())
    assert "keep is the newest" in " ".join(ran("compact", folder).stdout.split()), "no version is compacted"
    assert whole(repository)
    assert run_json("compact", folder, 99, code=4)["error"]["kind"] == "NotFound"


def test_compact_reports_a_version_that_is_not_a_delta(folder: Path) -> None:
    assert ran("compact", folder, 1).stdout.splitlines() == ["version 1 is not a delta to another version"]
    text = ran("compact", folder, 3, 6, "--dry-run").stdout
    assert "whole" in text
    assert text.splitlines()[-1] == "version 6 is not a delta to another version"


def test_a_thinned_delta_history_keeps_weights_that_dcp_loads(folder: Path) -> None:
    """The first prune thins the kept versions and the second compacts them; torch's DCP reads the remaining weights."""
    repository = open_repository(str(folder))
    rules = ("prune", folder, "--keep-every", 3, "--resumable", 1, "--compact")
    repository.unpin("good")
    first, second = run_json(*rules), run_json(*rules)
    assert (first["thinned"], first["compacted"], first["dropped"]) == ([1, 3], [], [2, 4, 5])
    assert "base of version 3: version 3 is thinned first" in first["versions"][0]["rules"]
    assert (second["thinned"], second["compacted"], second["dropped"]) == ([], [3], [1])
    assert {entry.id: (entry.bases, entry.resumable) for entry in repository.root().versions} == {
        3: ((), False),
        6: ((), True),
        7: ((6,), True),
    }
    for version in repository.versions():
        repository.verify(version)
        into = {"model": {"w": torch.zeros(600, 500, dtype=torch.bfloat16)}}
        dcp.load(into, storage_reader=Reader(str(folder), version=version.id), no_dist=True)
        assert torch.equal(into["model"]["w"], STATES[version.step]["model"]["w"])


def test_a_damaged_base_is_reported_and_its_deltas_stay(folder: Path) -> None:
    repository = open_repository(str(folder))
    first = repository.version(1)
    for pack in first.packs:
        repository.store.put(keys.pack(1, first.attempt, *pack.place), [bytes(pack.size)])
    before = bases(repository)
    fields = run_json("compact", folder, code=3)
    assert fields["compacted"] == []
    assert f"/00000001-{first.attempt}/" in fields["error"]["subject"]
    assert bases(repository) == before


@pytest.mark.parametrize("options", [[], ["--compact"]])
def test_a_damaged_record_does_not_block_retention_of_others(folder: Path, options: list[str]) -> None:
    repository = open_repository(str(folder))
    record = folder / repository.version(1).record_key
    record.write_bytes(record.read_bytes()[:-3])
    fields = run_json("prune", folder, "--keep-last", "1", *options, code=3 if options else 0)
    assert fields["dropped"] == [2, 4, 5]
    assert set(bases(repository)) == {1, 3, 6, 7}
    if options:
        assert fields["error"]["subject"] == str(record.relative_to(folder))


def test_a_run_compacts_versions_that_it_keeps(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = open_repository(str(folder))
    housekeeping = Housekeeping(Committer(repository, "me"), grace=0.0)
    with caplog.at_level(logging.INFO):
        housekeeping.run(POLICY, bases=[6])
        assert bases(repository) == {1: (), 3: (), 6: (), 7: (6,)}
        assert "version 3, step 2, was written whole" in caplog.text
        housekeeping.run(POLICY, bases=[6])
    assert bases(repository) == {3: (), 6: (), 7: (6,)}
    assert "version 1, step 0, is dropped: no rule keeps it" in caplog.text
    assert whole(repository)


def test_a_run_skips_a_compaction_that_is_too_large(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = open_repository(str(folder))
    housekeeping = Housekeeping(Committer(repository, "me"), grace=0.0, moved=1 << 20)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            housekeeping.run(POLICY, bases=[6])
    assert bases(repository) == {1: (), 3: (1,), 6: (), 7: (6,)}
    assert caplog.text.count(f"version 3 is left to `raystow prune {repository.uri} --compact`") == 1


def test_a_run_does_not_retry_an_unreadable_version(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = open_repository(str(folder))
    first = repository.version(1)
    repository.store.delete([keys.pack(1, first.attempt, *pack.place) for pack in first.packs])
    housekeeping = Housekeeping(Committer(repository, "me"), grace=0.0)
    for _ in range(2):
        housekeeping.run(POLICY, bases=[6])
    assert caplog.text.count("version 3 stays a delta: ") == 1
    assert bases(repository) == {1: (), 3: (1,), 6: (), 7: (6,)}
