"""Count the concepts of the project at some revisions of Git, a column each.

    python tools/count_concepts.py                      # HEAD
    python tools/count_concepts.py 158452d HEAD         # before and after
    python tools/count_concepts.py --protocols HEAD     # each Protocol with its implementations
    python tools/count_concepts.py --json 158452d HEAD  # the figures by revision, as in benchmarks/results/concepts-*.json

Nothing is imported: the trees of the sources are counted.

- **classes**: class statements in ``raystow``, nested ones included.
- **message types**: classes with the base ``Message`` or ``MessagePart``, ``Message`` included.
- **Protocols**: classes with the base ``Protocol``.
- **Protocols, fewer than two implementations**: those that fewer than two classes of ``raystow`` satisfy. A class satisfies a
  Protocol if it names it as a base, or has all its members by name: its own, those of bases, and what its methods assign to
  ``self``. A function satisfies a Protocol of ``__call__`` if its parameters have the same names. Objects of other packages are
  not seen; the docstring of the Protocol names them.
- **Any**: occurrences of the word in ``raystow``, imports and docstrings included.
- **files**, **lines**: of ``raystow``; **longest file** is that of all Python files.
- **public names**: ``raystow.__all__``.
- **words of documents**: those of ``docs`` and of the pages in the root, tables and code included.
- **private members in tests**: uses of a private name that ``raystow`` defines: attributes (not of ``self``, ``cls`` or what is
  imported from another package), imports, and names in the text arguments of ``setattr``.
- **setattr in tests**: calls of the method ``setattr`` (of ``monkeypatch``).
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def bases(node: ast.ClassDef) -> set[str]:
    """Return the last parts of the names of a class's bases, without parameters."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return {
        base.attr if isinstance(base, ast.Attribute) else base.id for base in plain if isinstance(base, ast.Attribute | ast.Name)
    }


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def members(node: ast.ClassDef) -> set[str]:
    """Return the names that a class defines, and those that its methods assign to ``self``."""
    own = {one.name for one in node.body if isinstance(one, Function | ast.ClassDef)}
    own |= {target.id for one in node.body for target in targets(one) if isinstance(target, ast.Name)}
    assigned = (target for one in ast.walk(node) for target in targets(one) if isinstance(target, ast.Attribute))
    return own | {target.attr for target in assigned if isinstance(target.value, ast.Name) and target.value.id == "self"}


def parameters(node: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, without ``self``."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return tuple(one.arg for one in every if one.arg not in {"self", "cls"})


def is_private(name: str) -> bool:
    """Names that begin and end with underscores belong to protocols of Python, ctypes and IPython."""
    return name.startswith("_") and not name.endswith("_")


def definitions(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def foreign_names(tree: ast.AST) -> set[str]:
    """Return what a module imports from elsewhere than ``raystow``."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names} - {"raystow"}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("raystow"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def root_name(expression: ast.expr) -> str:
    """Return the name with which a chain of attributes, calls and subscripts begins."""
    while isinstance(expression, ast.Attribute | ast.Call | ast.Subscript):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def is_patch(node: ast.AST) -> TypeGuard[ast.Call]:
    """Tell whether a node calls ``setattr`` of an object, as of a ``MonkeyPatch``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"


def private_uses(tree: ast.AST, names: set[str]) -> list[str]:
    """Return the private names that a test module imports, patches, or reads from anything but ``self`` and ``cls``.

    Args:
        tree: Of the test module.
        names: The private names that the package defines.
    """
    foreign, found = foreign_names(tree), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            found += [] if own or root_name(node.value) in foreign else [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raystow"):
            found += [alias.name for alias in node.names if is_private(alias.name)]
        elif is_patch(node):
            texts = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            found += [name for text in texts if (name := text.rpartition(".")[2]) in names]
    return found


def patches(tree: ast.AST) -> int:
    """Return how many calls of ``setattr`` a test module makes on an object."""
    return sum(is_patch(node) for node in ast.walk(tree))


@dataclass(frozen=True)
class Revision:
    """The text files of a revision, by path."""

    texts: Mapping[str, str]

    @classmethod
    def of(cls, name: str) -> Revision:
        """Read a revision of the repository."""
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            wanted = [one for one in files if one.isfile() and one.name.endswith((".py", ".md"))]
            return cls({one.name: files.extractfile(one).read().decode() for one in wanted})  # type: ignore[union-attr]

    @classmethod
    def checkout(cls, folders: tuple[str, ...]) -> Revision:
        """Read folders of the working tree."""
        paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
        return cls({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """The trees of all Python files, by path."""
        return {path: ast.parse(text) for path, text in self.texts.items() if path.endswith(".py")}

    def package(self, folder: str = "raystow") -> list[ast.Module]:
        """Return the trees of a folder."""
        return [tree for path, tree in self.modules.items() if path.startswith(f"{folder}/")]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """All classes of the package."""
        return [node for tree in self.package() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def _by_name(self) -> dict[str, ast.ClassDef]:
        return {one.name: one for one in self.classes}

    def _family(self, name: str) -> set[str]:
        """Return a class's name and those of its ancestors, as far as they are known."""
        known = bases(self._by_name[name]) - {name} if name in self._by_name else set()
        return {name}.union(*(self._family(base) for base in known))

    def _all_members(self, name: str) -> set[str]:
        own = (self._own_members[one] for one in self._family(name) if one in self._by_name)
        return set().union(*own)

    @cached_property
    def _own_members(self) -> dict[str, set[str]]:
        return {name: members(node) for name, node in self._by_name.items()}

    @cached_property
    def implementations(self) -> dict[str, list[str]]:
        """The classes and functions of the package that satisfy each Protocol."""
        protocols = [one for one in self.classes if "Protocol" in bases(one)]
        plain = {one.name: self._all_members(one.name) for one in self.classes if "Protocol" not in bases(one)}
        nodes = [node for tree in self.package() for node in ast.walk(tree) if isinstance(node, Function)]
        functions = [(node, parameters(node)) for node in nodes]
        found: dict[str, list[str]] = {}
        for protocol in protocols:
            needed = self._all_members(protocol.name)
            satisfying = (name for name, own in plain.items() if needed <= own or protocol.name in self._family(name))
            found[protocol.name] = [*satisfying]
            if needed == {"__call__"}:
                (call,) = (one for one in protocol.body if isinstance(one, Function))
                found[protocol.name] += [node.name for node, own in functions if node is not call and own == parameters(call)]
        return found

    @cached_property
    def private_uses(self) -> dict[str, list[str]]:
        """The private names of the package that tests use, by path."""
        names = {name for tree in self.package() for name in definitions(tree) if is_private(name)}
        uses = {path: private_uses(tree, names) for path, tree in self.modules.items() if path.startswith("tests/")}
        return {path: found for path, found in uses.items() if found}

    @cached_property
    def patches(self) -> dict[str, int]:
        """The calls of ``setattr`` in tests, by path."""
        counts = {path: patches(tree) for path, tree in self.modules.items() if path.startswith("tests/")}
        return {path: count for path, count in counts.items() if count}

    def figures(self) -> dict[str, int]:
        """Return what is counted, by name."""
        sources = [text for path, text in self.texts.items() if path.startswith("raystow/") and path.endswith(".py")]
        documents = [text for path, text in self.texts.items() if re.fullmatch(r"(docs/.*|[^/]*)\.md", path)]
        exported = ast.walk(self.modules["raystow/__init__.py"])
        (public,) = (node.value for node in exported for name in targets(node) if ast.unparse(name) == "__all__")  # type: ignore[attr-defined]
        return {
            "classes": len(self.classes),
            "message types": sum(not bases(one).isdisjoint({"Message", "MessagePart"}) for one in self.classes),
            "Protocols": len(self.implementations),
            "Protocols, fewer than two implementations": sum(len(one) < 2 for one in self.implementations.values()),
            "Any": sum(len(re.findall(r"\bAny\b", text)) for text in sources),
            "files": len(sources),
            "lines": sum(text.count("\n") for text in sources),
            "longest file, lines": max(self.texts[path].count("\n") for path in self.modules),
            "public names": len(ast.literal_eval(public)),
            "words of documents": sum(len(text.split()) for text in documents),
            "private members in tests": sum(map(len, self.private_uses.values())),
            "setattr in tests": sum(self.patches.values()),
        }


def table(columns: Mapping[str, Mapping[str, int]]) -> Iterable[str]:
    """Yield the lines of a table with a column for each revision."""
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(f'{figures[name]:,}' for figures in columns.values())} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the concepts of the project at some revisions.")
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    parser.add_argument("--protocols", action="store_true", help="list each Protocol with its implementations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    revisions = {name: Revision.of(name) for name in arguments.revisions}
    if arguments.protocols:
        for name, revision in revisions.items():
            print(f"{name}:")
            for protocol, found in sorted(revision.implementations.items(), key=lambda one: len(one[1])):
                print(f"  {protocol}: {len(found)} {' '.join(found[:5])}")
        return
    columns = {name: revision.figures() for name, revision in revisions.items()}
    if arguments.json:
        print(json.dumps(columns, indent=1))
    else:
        print("\n".join(table(columns)))


if __name__ == "__main__":
    main()
