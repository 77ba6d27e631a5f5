"""Run raystow commands in this process, as an operator types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from integration import schemas
from raystow.cli.app import build


def run(*words: object, input: str | None = None, columns: int = 80, **environment: str) -> Result:
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", **environment}
    return CliRunner().invoke(build(), [str(word) for word in words], input=input, env=env)


def ran(*words: object, code: int = 0, **how: Any) -> Result:
    """Run a command, assert that it exits with ``code``, and return its result."""
    result = run(*words, **how)
    assert result.exit_code == code, result.output
    return result


def run_json(*words: object, code: int = 0, **how: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(ran(*words, "--json", code=code, **how).stdout)
    schemas.check(str(words[0]), fields)
    return fields


def without_packs(folder: Path, copy: Path) -> Path:
    """Copy the repository in ``folder`` without its packs, and return the path of the copy."""
    return Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.pack")))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
