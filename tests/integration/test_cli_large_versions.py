"""Commands on versions of many nodes read the manifest one fragment at a time, with the results of a small one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.large_versions import LITTLE, ROWS, keep_rows, peak_of, save

from integration.cli_runner import ran
from raystow.storage.repository import create_repository

FEW, MANY = 2, 8  # nodes
TENSORS = 48
COMMANDS = {
    "restore": ["restore", "RUN", "-o", "NEW"],
    "export": ["export", "RUN", "--hf", "NEW"],
    "export to torch": ["export", "RUN", "--torch", "NEW"],
    "diff": ["diff", "RUN", "1", "2", "--json"],
    "deep diff": ["diff", "RUN", "1", "2", "--deep", "--json"],
    "plan": ["plan", "RUN", "--world", "3", "--json"],
    "replicated plan": ["plan", "RUN", "--world", "2", "--replicated", "--json"],
    "show": ["show", "RUN", "--json"],
    "verify": ["verify", "RUN", "--deep", "--json"],
}


def make(folder: Path, nodes: int, tensors: int) -> Path:
    """Two versions that differ in one tensor, whose nodes have other numbers in the second one."""
    repository = create_repository(str(folder))
    save(repository, nodes, tensors)
    save(repository, nodes, tensors, first=1)
    return folder


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return repositories whose versions have many rows, by the number of nodes. Tests must not change them."""
    folder = tmp_path_factory.mktemp("worlds")
    return {nodes: make(folder / f"{nodes}", nodes, TENSORS) for nodes in (FEW, MANY)}


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of rows from which on a manifest is large."""
    return lambda rows: keep_rows(monkeypatch, rows)


def outcome(command: str, run: Path, new: Path) -> list[object]:
    """Run a command; return its output and the files that it writes."""
    words = [{"RUN": run, "NEW": new}.get(word, word) for word in COMMANDS[command]]
    text = re.sub(r'"seconds": .*', "", ran(*words).stdout)
    paths = sorted(new.iterdir()) if new.is_dir() else [new] if new.exists() else []
    return [text.replace(str(new.parent), ""), *((path.name, path.read_bytes()) for path in paths)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_the_same_with_a_large_manifest(command: str, tmp_path: Path, keep: Any) -> None:
    run = make(tmp_path / "run", 4, 3)
    small = outcome(command, run, tmp_path / "small" / "new")
    keep(2 * ROWS)
    assert outcome(command, run, tmp_path / "large" / "new") == small


@pytest.mark.parametrize("command", ["restore", "export", "export to torch", "deep diff", "plan"])
@pytest.mark.long
def test_the_memory_of_a_command_does_not_grow_with_the_nodes(
    command: str, worlds: dict[int, Path], tmp_path: Path, keep: Any
) -> None:
    keep(FEW * ROWS * TENSORS // 2)
    outcome(command, worlds[FEW], tmp_path / "first")  # imports
    few = peak_of(lambda: outcome(command, worlds[FEW], tmp_path / "few"))
    many = peak_of(lambda: outcome(command, worlds[MANY], tmp_path / "many"))
    assert many - few < (MANY - FEW) * ROWS * TENSORS * LITTLE
