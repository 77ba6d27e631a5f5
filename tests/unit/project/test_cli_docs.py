"""docs/cli.md equals the output of tools/cli_docs.py."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    generator = runpy.run_path(str(ROOT / "tools" / "cli_docs.py"))
    assert (ROOT / "docs" / "cli.md").read_text() == generator["render"](), "run `make cli-docs`"


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs" / "cli.md").read_text().split()) <= 4500
