"""``raystow verify``, as an operator or a nightly job runs it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import overwrite_root, whole, write
from helpers.local_cluster import LocalCluster
from rich.console import Console

from integration.cli_runner import flip_byte, run, run_json
from raystow.cli import progress
from raystow.cli import verify as cli_verify
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, StoreError, StoreUnavailable, Unsupported, Untrusted
from raystow.storage.repository import Repository, create_repository, open_repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of three versions with two packs each."""
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (10, 20, 30):
            local.save({"w": torch.randn(100, 100), "optim": {"m": torch.randn(50)}}, step=step)
    return tmp_path / "run"


def pack(folder: Path, version: int) -> Path:
    return next(folder.glob(f"versions/{version:08d}-*/weights-*.pack"))


def outcomes(report: dict[str, Any]) -> list[str]:
    return [row["outcome"] for row in report["versions"]]


def verified(folder: Path) -> int:
    return open_repository(str(folder)).root().verified


def test_versions_that_depend_on_a_damaged_one_are_listed(tmp_path: Path) -> None:
    committer = Committer(create_repository(str(tmp_path / "run")), "me")
    states = [np.arange(20_000) + step for step in range(4)]
    for state, base in zip(states, (None, 1, 1, 3), strict=True):
        write(committer, {"w": whole(state)}, base=base and (base, {"w": states[base - 1]}))
    damaged = pack(tmp_path / "run", 1)
    flip_byte(damaged)
    report = run_json("verify", tmp_path / "run", "--deep", "--all", code=3)
    assert outcomes(report) == ["damaged"] * 4
    assert [row.get("dependents") for row in report["versions"]] == [[2, 3, 4], None, [4], None]
    assert all(damaged.name in str(row["error"]) for row in report["versions"])
    result = run("verify", tmp_path / "run", "1", "--deep")
    assert "cannot be read without it: versions 2, 3, 4" in result.stdout
    assert "needs    version 3" in run("show", tmp_path / "run", "4").stdout


# Quick verification


def test_quick_reports_that_it_read_no_pack(folder: Path) -> None:
    flip_byte(pack(folder, 3))
    result = run("verify", folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("version 3 (step 30): whole, 2 tensors, 2 chunks, ")
    assert lines[1] == "1 whole; no pack was read: --deep reads them"
    assert max(map(len, lines)) <= 80
    (row,) = run_json("verify", folder)["versions"]
    assert (row["mode"], row["packs"], row["read"], row["resumed"]) == ("quick", 2, 0, 0)


def test_quick_detects_a_truncated_pack(folder: Path) -> None:
    path = pack(folder, 3)
    path.write_bytes(path.read_bytes()[:-1])
    result = run("verify", folder)
    assert result.exit_code == 3
    assert path.name in result.stderr


@pytest.mark.parametrize("name", ["version.json", "tensors-*.parquet"])
def test_a_damaged_record_or_fragment_is_named(folder: Path, name: str) -> None:
    path = next(folder.glob(f"versions/00000003-*/{name}"))
    flip_byte(path)
    result = run("verify", folder)
    assert result.exit_code == 3
    assert path.name in result.stderr


def test_quick_records_no_verified_version(folder: Path) -> None:
    assert run_json("verify", folder, "--all")["recorded"] is None
    assert verified(folder) == 0


# Deep verification


def test_deep_reads_every_byte(folder: Path) -> None:
    result = run("verify", folder, "--deep")
    assert result.exit_code == 0
    assert "version 3 (step 30): whole" in result.stdout
    report = run_json("verify", folder, "--deep", "--all")
    assert outcomes(report) == ["whole"] * 3
    stored = [version.bytes for version in open_repository(str(folder)).versions()]
    assert [row["stored"] for row in report["versions"]] == [row["read"] for row in report["versions"]] == stored
    assert {row["mode"] for row in report["versions"]} == {"deep"}
    sums = report["summary"]
    assert (sums["versions"], sums["whole"], sums["damaged"], sums["read"]) == (3, 3, 0, sum(stored))
    assert "error" not in report


def test_a_flipped_byte_is_reported_and_the_rest_is_verified(folder: Path) -> None:
    path = pack(folder, 1)
    flip_byte(path)
    key = str(path.relative_to(folder))

    result = run("verify", folder, 1, "--deep")
    assert result.exit_code == 3
    assert "version 1 (step 10): DAMAGED" in result.stdout
    assert key in result.stderr
    assert "'w'" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert run("verify", folder, "--deep").exit_code == 0  # the newest version is whole

    report = run_json("verify", folder, "--deep", "--all", code=3)
    assert outcomes(report) == ["damaged", "whole", "whole"]
    assert report["error"] == report["versions"][0]["error"]
    assert (report["error"]["kind"], report["error"]["subject"]) == ("Damaged", key)
    assert (report["summary"]["whole"], report["summary"]["damaged"]) == (2, 1)

    result = run("verify", folder, "--deep", "--all")
    assert result.exit_code == 3
    assert "2 whole, 1 damaged; " in result.stdout


def test_the_newest_whole_version_is_recorded_in_the_root(folder: Path) -> None:
    flip_byte(pack(folder, 3))
    assert run_json("verify", folder, 3, "--deep", code=3)["recorded"] is None
    assert verified(folder) == 0
    assert run_json("verify", folder, "--deep", "--all", code=3)["recorded"] == 2
    assert verified(folder) == 2


def test_deep_continues_with_older_versions_until_one_is_whole(folder: Path) -> None:
    assert run_json("verify", folder, "--deep")["recorded"] == 3
    flip_byte(pack(folder, 3))
    result = run("verify", folder, "--deep")
    assert result.exit_code == 3
    lines = [line for line in result.stdout.splitlines() if line.startswith("version")]
    assert [line.split(":")[1].split(",")[0] for line in lines] == [" DAMAGED", " whole"]
    assert "1 whole, 1 damaged; " in result.stdout
    assert verified(folder) == 2

    flip_byte(pack(folder, 2))
    report = run_json("verify", folder, "latest", "--deep", code=3)
    assert [(row["id"], row["outcome"]) for row in report["versions"]] == [(3, "damaged"), (2, "damaged"), (1, "whole")]
    assert (report["recorded"], report["error"]) == (1, report["versions"][0]["error"])


def test_only_deep_of_the_latest_goes_back_and_up_to_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (2, 3):
        flip_byte(pack(folder, version))
    assert outcomes(run_json("verify", folder, 3, "--deep", code=3)) == ["damaged"]
    assert outcomes(run_json("verify", folder, code=0)) == ["whole"]  # a quick verification reads no pack
    monkeypatch.setattr(cli_verify, "BACK", 2)
    report = run_json("verify", folder, "--deep", code=3)
    assert (outcomes(report), report["recorded"]) == (["damaged", "damaged"], None)


def test_a_store_failure_stops_the_search_for_a_whole_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_byte(pack(folder, 3))
    fail_on(monkeypatch, 2, StoreUnavailable("no answer"))
    assert outcomes(run_json("verify", folder, "--deep", code=3)) == ["damaged", "unchecked"]


def test_a_verified_version_found_damaged_is_replaced(folder: Path) -> None:
    """The newest whole version becomes the verified one."""
    assert run_json("verify", folder, "--deep", "--all")["recorded"] == 3
    flip_byte(pack(folder, 1))
    assert run_json("verify", folder, 1, "--deep", code=3)["recorded"] == 3  # version 1 is not the verified one
    flip_byte(pack(folder, 3))
    assert run_json("verify", folder, "--deep", "--all", code=3)["recorded"] == 2
    assert verified(folder) == 2
    assert run("prune", folder, "--keep-last", 1, "--yes").exit_code == 0
    assert [version.id for version in open_repository(str(folder)).versions()] == [2, 3]
    assert run("verify", folder, 2, "--deep").exit_code == 0


def test_a_read_only_store_is_verified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Repository, *whole: Any, damaged: Any) -> int:
        raise StoreError("Access Denied", subject="root.json")

    monkeypatch.setattr(Repository, "record_verified", refuse)
    result = run("verify", folder, "--deep")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["note: the result is not recorded in the root: root.json: Access Denied"]
    report = run_json("verify", folder, "--deep")
    assert (report["recorded"], report["warning"]["what"]) == (None, "Access Denied")


# Other failures during a verification


def fail_on(
    monkeypatch: pytest.MonkeyPatch, version_id: int, error: Exception, before: Callable[[Repository], None] = lambda _: None
) -> None:
    """Let the verification of a version end with an error. ``before``: what happens to the repository meanwhile."""
    whole = Repository.verify

    def verify(self: Repository, version: Any, *rest: Any, **options: Any) -> Any:
        if version.id == version_id:
            before(self)
            raise error
        return whole(self, version, *rest, **options)

    monkeypatch.setattr(Repository, "verify", verify)


def test_a_version_removed_while_verified_is_not_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(repository: Repository) -> None:
        overwrite_root(repository, lambda root: type(root)(**{**vars(root), "versions": ()}))

    fail_on(monkeypatch, 3, Damaged("the pack is missing"), remove)
    assert outcomes(run_json("verify", folder)) == ["removed"]


def test_results_before_a_store_failure_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, 2, StoreUnavailable("no answer"))
    report = run_json("verify", folder, "--deep", "--all", code=1)
    assert outcomes(report) == ["whole", "unchecked"]
    assert (report["error"]["kind"], report["recorded"]) == ("StoreUnavailable", 1)

    flip_byte(pack(folder, 1))
    report = run_json("verify", folder, "--deep", "--all", code=3)  # damage takes precedence over the store failure
    assert outcomes(report) == ["damaged", "unchecked"]
    assert report["error"]["kind"] == "Damaged"


def test_an_undecodable_version_does_not_stop_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, 1, Unsupported("codec 'ans' is decoded on a GPU only"))
    result = run("verify", folder, "--deep", "--all")
    assert result.exit_code == 1
    assert "version 1 (step 10): UNCHECKED" in result.stdout
    assert "2 whole, 1 unchecked; " in result.stdout
    assert "'ans'" in result.stderr


def test_an_untrusted_version_is_reported_as_untrusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, 2, Untrusted("no signature by a trusted key"))
    report = run_json("verify", folder, "--all", code=6)
    assert outcomes(report) == ["whole", "untrusted", "whole"]
    pack(folder, 1).unlink()
    assert outcomes(run_json("verify", folder, "--all", code=3)) == ["damaged", "untrusted", "whole"]


# --resume


def test_a_stopped_verification_resumes(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    flip_byte(pack(folder, 3))
    assert outcomes(run_json("verify", folder, "--deep", "--all", "--resume", notes, code=3)) == ["whole", "whole", "damaged"]
    flip_byte(pack(folder, 3))

    report = run_json("verify", folder, "--deep", "--all", "--resume", notes)
    assert outcomes(report) == ["whole"] * 3
    versions = report["versions"]
    assert [row["resumed"] for row in versions[:2]] == [row["stored"] for row in versions[:2]]
    assert versions[2]["read"] >= pack(folder, 3).stat().st_size
    assert report["summary"]["resumed"] + report["summary"]["read"] == report["summary"]["stored"]
    assert report["recorded"] == 3

    result = run("verify", folder, "--deep", "--resume", notes)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "1 whole; 0 B read, " in text
    assert f" skipped as listed in {notes}" in text


def test_progress_of_another_repository_is_refused(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    other = create_repository(str(tmp_path / "other"))
    assert run("verify", other.uri, "--deep", "--all", "--resume", notes).exit_code == 0
    error = run_json("verify", folder, "--deep", "--resume", notes, code=2)["error"]
    assert (error["kind"], error["subject"]) == ("StateError", str(notes))
    assert other.id in error["what"]


def test_invalid_option_combinations_are_usage_errors(folder: Path, tmp_path: Path) -> None:
    assert run("verify", folder, 1, "--all").exit_code == 2
    assert run("verify", folder, "--resume", tmp_path / "notes").exit_code == 2
    assert run("verify", folder, "--deep", "--resume", tmp_path).exit_code == 2
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.s3
def test_verify_checks_versions_on_s3(s3_uri: str, tmp_path: Path) -> None:
    with LocalCluster(s3_uri) as local:
        version = local.save({"w": torch.randn(100, 100), "optim": {"m": torch.randn(50)}}, step=1)
    assert outcomes(run_json("verify", s3_uri)) == ["whole"]
    for done in (0, version.bytes):
        (row,) = run_json("verify", s3_uri, "--deep", "--resume", tmp_path / "notes")["versions"]
        assert (row["outcome"], row["resumed"], row["read"]) == ("whole", done, version.bytes - done)
    key = next(info.key for info in local.repository.store.list("versions/") if info.key.endswith(".pack"))
    local.repository.store.delete([key])
    assert run_json("verify", s3_uri, code=3)["error"]["subject"] == key


# Progress bar


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the terminal on which progress is shown."""
    shown = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=shown, force_terminal=True, width=100))
    return shown


def test_a_collection_shows_how_many_objects_it_has_listed(folder: Path, screen: io.StringIO) -> None:
    objects = sum(path.is_file() for path in (folder / "versions").rglob("*"))
    assert run("gc", folder, "--dry-run").exit_code == 0
    assert "listing" in screen.getvalue()
    assert f"{objects}/?" in screen.getvalue()


@pytest.mark.parametrize("words", [("--all",), ("--all", "--deep")])
def test_the_progress_bar_counts_versions(folder: Path, screen: io.StringIO, words: tuple[str, ...]) -> None:
    result = run("verify", folder, *words)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 4  # the bar is not on stdout
    shown = screen.getvalue()
    assert "1 of 3 versions done" in shown
    assert "3 of 3 versions done" in shown
    assert ("117.8/117.8 KiB" in shown) == ("--deep" in words)
    run("verify", folder, *words, "--json")
    assert screen.getvalue() == shown
