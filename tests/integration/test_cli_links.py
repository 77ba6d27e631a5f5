"""Links in folders that ``raystow export`` reads, and links as its outputs: none may lead out of its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run_json

COPIED = ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one version."""
    folder = tmp_path_factory.mktemp("weights")
    with LocalCluster(str(folder)) as cluster:
        cluster.save({"model": {"w": torch.ones(4)}}, step=1)
    return folder


def config_folder(folder: Path) -> Path:
    """Write files of a model, and one that is private."""
    folder.mkdir()
    for name in (*COPIED, ".env"):
        (folder / name).write_text(f'{{"name": "{name}"}}')
    return folder


def link_of(config: Path, name: str, to: Path | str) -> Path:
    (config / name).symlink_to(to)
    return config


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("tokenizer.txt", "{}/credentials.json"),
        ("config.json", "../credentials.json"),
        ("LICENSE", "sub/credentials.json"),
        ("README.md", "/proc/self/environ"),
    ],
)
def test_a_link_that_leaves_the_folder_is_refused(weights: Path, tmp_path: Path, name: str, to: str) -> None:
    (tmp_path / "credentials.json").write_text("{}")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "sub").symlink_to(tmp_path)
    config = link_of(tmp_path / "config", name, to.format(tmp_path))
    error = run_json("export", weights, "--hf", tmp_path / "out", "--files", config, code=2)["error"]
    assert error["subject"] == str(config / name)
    assert "leads out of its folder" in error["what"]
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_are_copied(weights: Path, tmp_path: Path) -> None:
    """But not to a file that would not be copied by its own name, and nothing that is no regular file."""
    config = link_of(config_folder(tmp_path / "config"), "LICENSE", "config.json")
    link_of(config, "README.md", ".env")
    link_of(config, "NOTES.md", "missing.md")
    os.mkfifo(config / "vocab.txt")
    facts = run_json("export", weights, "--hf", tmp_path / "out", "--files", config)
    assert facts["copied"] == ["LICENSE", *COPIED]
    assert (tmp_path / "out" / "LICENSE").read_bytes() == (config / "config.json").read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_pipe_as_config_is_not_read(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    os.mkfifo(tmp_path / "config" / "config.json")
    facts = run_json("export", weights, "--hf", tmp_path / "out", "--files", tmp_path / "config")
    assert (facts["copied"], facts["tied"]) == ([], {})


def test_the_blobs_of_a_hugging_face_cache_are_copied(weights: Path, tmp_path: Path) -> None:
    """But no blobs that are links themselves: who gives a snapshot may give the folder around it, too."""
    snapshot, blobs = tmp_path / "models--org--tiny" / "snapshots" / "0a1b", tmp_path / "models--org--tiny" / "blobs"
    for path in (snapshot, blobs):
        path.mkdir(parents=True)
    for file in config_folder(tmp_path / "config").glob("*.json"):
        shutil.copy(file, blobs / f"{len(file.name):040x}")
        link_of(snapshot, file.name, f"../../blobs/{len(file.name):040x}")
    facts = run_json("export", weights, "--hf", tmp_path / "out", "--files", snapshot)
    assert facts["copied"] == COPIED
    shutil.move(blobs, tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    error = run_json("export", weights, "--hf", tmp_path / "new", "--files", snapshot, code=2)["error"]
    assert "leads out of its folder" in error["what"]


@pytest.mark.parametrize("option", ["--hf", "--torch"])
def test_an_output_link_that_leads_elsewhere_is_refused(weights: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "here").mkdir()
    output = link_of(tmp_path / "here", "out", tmp_path / "elsewhere") / "out"
    error = run_json("export", weights, option, output, code=2)["error"]
    assert (error["subject"], "leads out of its folder" in error["what"]) == (str(output), True)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert output.is_symlink()
