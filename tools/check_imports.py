"""Find imports that import-linter cannot see, and cycles of modules. Part of ``make lint``.

Each module may import any module that its layer allows, but by an import statement. A call of ``import_module`` or ``__import__``
would hide an import from the contracts, so only two modules make one, each by a table of names in it: the public interface,
and the commands. An import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
TABLES = {"raystow/__init__.py", "raystow/cli/app.py"}
"""Modules that import by a table."""


def hidden_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each import by a call."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in {"import_module", "__import__", "resolve_name"}:
            yield node.lineno, name
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, one.name) for one in node.names if one.name in {"import_module", "resolve_name"})


def cycles(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Yield each cycle of modules, once."""
    cut: set[str] = set()
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            chain = graph.find_shortest_chain(imported, module)
            if chain and not cut & set(chain):
                cut.update(chain)
                yield [module, *chain]


def main() -> None:
    """Print what was found, and end with status 1 if that is something."""
    found = []
    for path in sorted((ROOT / "raystow").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in TABLES:
            found += [f"{name}:{line}: {call} hides an import: use an import statement" for line, call in hidden_imports(path)]
    found += [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(grimp.build_graph("raystow", cache_dir=None))]
    print("\n".join(found) or "No hidden imports, no cycles of modules")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
