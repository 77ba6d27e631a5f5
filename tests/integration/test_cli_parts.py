"""The commands know the parts of versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from integration.cli_runner import ran, run_json

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


def test_a_restored_folder_has_parts_in_their_own_file(folder: Path, tmp_path: Path) -> None:
    ran("restore", folder, "--output", tmp_path / "files")
    assert {path.name for path in (tmp_path / "files").iterdir()} == {
        "weights.safetensors",
        "parts.safetensors",
        "values.json",
    }
    assert "[part buffer].count" in (tmp_path / "files" / "values.json").read_text()
