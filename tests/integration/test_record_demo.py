"""tools/record_demo.py deletes the folder of a demo only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "record_demo.py"


def test_a_refused_folder_is_not_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "data").write_text("precious")
    command = [sys.executable, TOOL, tmp_path / "demo.svg", "--store", mine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "is not empty and not from a demo" in " ".join(done.stderr.split())
    assert (mine / "data").read_text() == "precious"
