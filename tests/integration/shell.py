"""The commands as an operator types them, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import schemas
from typer.testing import CliRunner, Result

from raystow.orchestrator.cli.app import build


def run(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], env={"COLUMNS": "80", "NO_COLOR": "1"})


def run_json(*words: object, code: int = 0) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == code, result.output
    fields: dict[str, Any] = json.loads(result.stdout)
    schemas.check(str(words[0]), fields)
    return fields


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
