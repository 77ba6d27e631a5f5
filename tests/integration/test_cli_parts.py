"""The commands know the parts of versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from integration.cli_runner import ran, run_json
from raystow.storage.format.key_files import SIGNING_KEY, TRUSTED_KEYS

PARTS = {"buffer": {"rows": np.arange(3000), "count": 5}, "rollouts": {"w": torch.ones(4)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "agent"
    with LocalCluster(str(folder), nodes=2) as local:
        for step in (1, 2):
            parts = {**PARTS, "buffer": {"rows": np.arange(3000) * step, "count": 5 * step}}
            local.save_with_parts({"model": {"w": torch.ones(50) * step}}, parts, step=step)
    return folder


def test_show_names_parts_and_their_sizes(folder: Path) -> None:
    assert run_json("show", folder)["parts"] == {"buffer": 24_000, "rollouts": 16}
    assert run_json("show", folder)["groups"]["parts"]["tensors"] == 2
    assert "parts    buffer (" in ran("show", folder).stdout


def test_ls_names_parts_of_versions(folder: Path) -> None:
    assert [row["parts"] for row in run_json("ls", folder, "--long")["versions"]] == [{"buffer": 24_000, "rollouts": 16}] * 2
    assert "parts" not in run_json("ls", folder)["versions"][0]
    assert ran("ls", folder, "--long", columns=200).stdout.count("with buffer and rollouts\n") == 2
    assert "buffer" not in ran("ls", folder).stdout


def test_copies_and_checks_include_parts(folder: Path, tmp_path: Path) -> None:
    ran("cp", folder, tmp_path / "copy")
    ran("verify", tmp_path / "copy", "--deep")
    ran("gc", tmp_path / "copy")
    copied, version = raystow.open(tmp_path / "copy").version(2), raystow.open(folder).version(2)
    assert copied.parts() == version.parts()
    assert np.array_equal(copied.read("[part buffer].rows"), np.arange(3000) * 2)
    next((tmp_path / "copy" / "versions").glob("00000002-*/parts-*.pack")).unlink()
    ran("verify", tmp_path / "copy", "--deep", code=3)


def test_diff_names_what_changed_in_a_part(folder: Path) -> None:
    facts = run_json("diff", folder, 1, 2)
    assert {row["name"] for row in facts["tensors"]} == {"[part buffer].rows", "model.w"}
    assert facts["values"]["changed"] == ["[part buffer].count"]


def test_a_model_is_exported_without_parts(folder: Path, tmp_path: Path) -> None:
    assert [file["tensors"] for file in run_json("export", folder, "--hf", tmp_path / "model")["files"]] == [1]


def test_a_whole_state_is_exported_with_parts(folder: Path, tmp_path: Path) -> None:
    ran("export", folder, "--torch", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")  # noqa: TID251
    assert state["[part buffer]"]["count"] == 10
    assert torch.equal(state["[part buffer]"]["rows"], torch.arange(3000) * 2)
    assert torch.equal(state["model"]["w"], torch.full((50,), 2.0))


def test_a_key_signs_parts_with_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after thinning has written a new record, and in a copy."""
    ours, theirs = run_json("keygen", tmp_path / "ours"), run_json("keygen", tmp_path / "theirs")
    monkeypatch.setenv(SIGNING_KEY, ours["private"])
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (1, 2):
            local.save_with_parts({"model": {"w": torch.ones(50)}}, PARTS, step=step)
    monkeypatch.delenv(SIGNING_KEY)
    ran("verify", tmp_path / "run", "--deep", **{TRUSTED_KEYS: ours["public"]})
    version = raystow.open(tmp_path / "run", trusted_keys=ours["public"]).version(2)
    assert np.array_equal(version.read("[part buffer].rows"), np.arange(3000))
    foreign = raystow.open(tmp_path / "run", trusted_keys=theirs["public"]).version(2)
    for look in foreign.parts, lambda: foreign.read("[part buffer].rows"), lambda: foreign.read("[part buffer].count"):
        with pytest.raises(raystow.Untrusted, match=ours["key"]):
            look()
    monkeypatch.setenv(SIGNING_KEY, ours["private"])
    ran("cp", tmp_path / "run", tmp_path / "copy")
    ran("prune", tmp_path / "copy", "--resumable", "1", "--yes")
    thin, whole = raystow.open(tmp_path / "copy", trusted_keys=ours["public"]).versions()
    assert (thin.parts(), whole.parts()) == ({}, {"buffer": 24_000, "rollouts": 16})


def test_dropped_versions_leave_no_parts_behind(tmp_path: Path) -> None:
    """Bytes that a kept version uses stay."""
    with LocalCluster(str(tmp_path / "run"), delta=3) as local:
        for step in (1, 2, 3):
            local.save_with_parts({"w": torch.ones(50) * step}, {"buffer": {"rows": np.arange(3000) * max(step, 2)}}, step=step)
    ran("compact", tmp_path / "run", "--yes")
    ran("prune", tmp_path / "run", "--keep-last", "1", "--yes")
    ran("gc", tmp_path / "run", "--grace", "0s", "--yes")
    ran("verify", tmp_path / "run", "--deep")
    (version,) = raystow.open(tmp_path / "run").versions()
    assert np.array_equal(version.read("[part buffer].rows"), np.arange(3000) * 3)
    assert {path.name[:8] for path in (tmp_path / "run" / "versions").iterdir()} == {"00000003"}


def test_a_restored_folder_has_parts_in_their_own_file(folder: Path, tmp_path: Path) -> None:
    ran("restore", folder, "--output", tmp_path / "files")
    assert {path.name for path in (tmp_path / "files").iterdir()} == {
        "weights.safetensors",
        "parts.safetensors",
        "values.json",
    }
    assert "[part buffer].count" in (tmp_path / "files" / "values.json").read_text()
