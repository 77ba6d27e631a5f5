"""Count the lines that a training script needs to resume bit for bit: with raystow, DCP and ``torch.save``.

    python benchmarks/adoption_lines.py

Each script is compared with the one that starts anew after a failure. Counted are lines that were added or changed, without blank
lines, comments and docstrings; ruff has formatted all of them.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("ddp", "fsdp2", "replay")
WAYS = {"raystow": "run", "DCP": "dcp", "torch.save": "torch_save"}


def code(path: Path) -> list[str]:
    """Return the lines of a script without blank lines, comments and docstrings."""
    source = path.read_text()
    dropped = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for number, line in enumerate(lines, 1) if number not in dropped and line.strip()]


def added(script: str, way: str) -> int:
    """Return the number of added and changed lines."""
    folder = ROOT / ("examples" if way == "run" else "benchmarks") / "adoption"
    plain, other = code(ROOT / "examples" / "adoption" / f"{script}_plain.py"), code(folder / f"{script}_{way}.py")
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, other))


def main() -> None:
    """Print a table for docs/comparison.md."""
    print("| script | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    for script in SCRIPTS:
        print(f"| `{script}` | " + " | ".join(str(added(script, way)) for way in WAYS.values()) + " |")


if __name__ == "__main__":
    main()
