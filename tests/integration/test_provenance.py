"""Each version says where it comes from: command line, commit, packages, hosts, the version resumed from, and notes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.builders import layers

import raystow
from integration.cli_runner import ran, run_json
from integration.ranks import every, save_state, start

pytestmark = pytest.mark.usefixtures("cluster")

_TRAIN = """
import sys
import numpy as np
import raystow
uri, steps, noted = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with raystow.Checkpointer(uri, rank=0, world_size=1, notes={"why": noted, "api_key": "hunter2"}) as checkpointer:
    state = {"w": np.zeros(4), "step": 0}
    version = checkpointer.restore_latest(into=state)
    for step in range(state["step"] + 1, state["step"] + steps + 1):
        state["w"], state["step"] = state["w"] + step, step
        checkpointer.save(state, step=step, metrics={"loss": 1 / step}).result(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in a git repository with one commit."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(_TRAIN)
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "train"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return folder / "train.py"


def _train(script: Path, uri: Path, *words: str) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(script), str(uri), *words]
    environment = {**os.environ, "RAY_ADDRESS": address}
    subprocess.run(command, check=True, env=environment, timeout=240, cwd=script.parent, capture_output=True)


@pytest.mark.long
def test_versions_tell_where_they_come_from(tmp_path: Path, script: Path) -> None:
    uri = tmp_path / "run"
    _train(script, uri, "1", "first", "--api-token", "hunter2")
    script.write_text(_TRAIN + "# changed\n")
    _train(script, uri, "1", "<b>second")
    first, second = raystow.open(uri).versions()
    commit = subprocess.run(["git", "-C", str(script.parent), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert first.provenance["commit"] == second.provenance["commit"] == commit.stdout.strip()
    assert (first.provenance["changed files"], second.provenance["changed files"]) == ("0", "1")
    assert first.provenance["command"].endswith(f"train.py {uri} 1 first --api-token ***")
    assert first.notes == {"why": "first", "api_key": "***"}
    assert first.provenance["hosts"] == platform.node()
    assert first.provenance["package python"] == platform.python_version()
    assert first.provenance["package ray"] == ray.__version__
    assert "resumed" not in first.provenance
    assert second.provenance["resumed"] == "1"
    assert first.provenance["run"] != second.provenance["run"]
    assert not any(b"hunter2" in path.read_bytes() for path in uri.rglob("version.json"))
    later, earlier = ran("log", uri, columns=300).output.splitlines()
    assert later.startswith("*  version 2, step 2: loss 0.5, ")
    assert later.endswith(" ago, resumed from version 1")
    assert earlier.endswith(" ago, fresh start")
    assert [(one["id"], one["parent"]) for one in run_json("log", uri)["versions"]] == [(2, 1), (1, None)]
    shown = ran("show", uri, columns=300).output
    assert "resumed  from version 1" in shown
    assert f"commit   {commit.stdout.strip()}, with 1 changed files" in shown
    assert "notes    why <b>second, api_key ***" in shown
    ran("report", uri, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Where the newest version comes from" in page
    assert f"{commit.stdout.strip()}, with 1 changed files" in page
    assert "why &lt;b&gt;second" in page
    assert run_json("show", uri)["provenance"] == second.provenance
    changes = run_json("diff", uri, 1, 2)["provenance"]
    assert changes["changed files"] == ["0", "1"]
    assert changes["note why"] == ["first", "<b>second"]
    assert "note why: first -> <b>second" in ran("diff", uri, 1, 2, columns=300).output


def test_workers_of_ray_record_the_drivers_command(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    save_state(ranks, 1, layers, 1000)
    (version,) = raystow.open(tmp_path).versions()
    assert version.provenance["command"].startswith(sys.executable) or "pytest" in version.provenance["command"]
    assert "default_worker" not in version.provenance["command"]
    assert platform.node() in version.provenance["hosts"]
    every(ranks, "leave")


@pytest.mark.parametrize("notes", [3, {1: "a"}, {"a": object()}, {"a": "x" * 20_000}], ids=["kind", "name", "value", "size"])
def test_notes_that_cannot_be_stored_are_refused(tmp_path: Path, notes: Any) -> None:
    with pytest.raises(raystow.StateError, match="notes"):
        raystow.Checkpointer(str(tmp_path), rank=0, world_size=1, notes=notes)
