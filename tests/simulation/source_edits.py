"""Edits of Python source by structure: an edit names a function, a pattern and a replacement.

An edit does not depend on formatting, comments, type annotations of locals, the names of locals, or the module of the function.
It fails with ``AssertionError`` unless the function and the pattern are found exactly once.

``Edit(function, pattern, new)``

- ``function``: the qualified name, such as ``"Committer.commit"``; nested functions belong to it. Where two modules have a
  function of that name, the module's own name goes first: ``"policy:plan"``.
- ``pattern``: an expression or a statement. ``$name`` matches any expression, and the same one each time within a bug;
  ``*$name`` matches the remaining arguments or elements, ``**$name`` the remaining keyword arguments. Keyword arguments match in
  any order. In ``if $x: ...``, and in other compound statements, ``...`` matches any body, and ``else`` stays as it is.
  The pattern ``"^"`` is the place before the first statement.
- ``new``: replaces what was matched; ``$name`` stands for what it matched. Empty removes a statement. It may use parameters,
  locals and imports of the function by name, which are checked to exist.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PREFIX = "ANY_"
_LAYOUT = {"lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "type_comment", "kind"}
_BODIES = {"body", "orelse", "handlers", "finalbody"}
Bound = dict[str, Any]


@dataclass(frozen=True)
class Edit:
    """One edit; see the docstring of the module."""

    function: str
    pattern: str
    new: str


def edited(package: Path, edits: tuple[Edit, ...]) -> dict[Path, str]:
    """Return the new source of each file that the edits change, by its path in ``package``."""
    trees: dict[Path, ast.Module] = {}
    bound: Bound = {}
    for edit in edits:
        path = _home(package, edit.function)
        tree = trees.setdefault(path, ast.parse((package / path).read_text()))
        function = next(node for name, node in _functions(tree) if name == edit.function.rpartition(":")[2])
        _apply(function, tree, edit, bound)
    return {path: ast.unparse(ast.fix_missing_locations(tree)) for path, tree in trees.items()}


@cache
def _index(package: Path) -> dict[str, list[tuple[Path, int]]]:
    """Return qualified name -> the files and lines that define a function of that name."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for file in sorted(package.rglob("*.py")):
        for name, node in _functions(ast.parse(file.read_text())):
            found.setdefault(name, []).append((file.relative_to(package), node.lineno))
    return found


def _home(package: Path, function: str) -> Path:
    """Return the only file that defines the function."""
    module, _, name = function.rpartition(":")
    homes = [(path, line) for path, line in _index(package).get(name, ()) if module in ("", path.stem)]
    assert len(homes) == 1, f"{function} is defined {len(homes)} times: {[f'{path}:{line}' for path, line in homes]}"
    return homes[0][0]


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Any]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{outer}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{outer}{node.name}", node


def _parse(text: str) -> list[ast.stmt]:
    return ast.parse(re.sub(r"\$(\w+)", rf"{_PREFIX}\1", text)).body


def _apply(function: Any, module: ast.Module, edit: Edit, bound: Bound) -> None:
    new = _parse(edit.new)
    _check_names(new, module, edit)
    if edit.pattern == "^":
        function.body[ast.get_docstring(function) is not None : 0] = new
        return
    pattern = _parse(edit.pattern)
    assert len(pattern) == 1, f"{edit.pattern!r} is not one statement or expression"
    wanted = pattern[0]
    single = isinstance(wanted, ast.Expr)
    found = []
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            for index, node in enumerate(value) if isinstance(value, list) else ((None, value),):
                # A call that is a statement is matched as a statement, so that an edit can remove it.
                if isinstance(parent, ast.Expr) or not isinstance(node, (ast.stmt, ast.expr)):
                    continue
                trial = dict(bound)
                candidate = wanted.value if single and isinstance(node, ast.expr) else wanted
                if _matches(candidate, node, trial):
                    found.append((parent, field, index, node, trial))
    assert len(found) == 1, f"{edit.pattern!r} is found {len(found)} times in {edit.function}"
    parent, field, index, node, trial = found[0]
    bound.update(trial)
    made = [_filled(each, bound) for each in new]
    if isinstance(node, ast.expr):
        assert len(made) == 1, f"{edit.new!r} is not an expression"
        assert isinstance(made[0], ast.Expr), f"{edit.new!r} is not an expression"
        if index is None:
            setattr(parent, field, made[0].value)
        else:
            getattr(parent, field)[index] = made[0].value
        return
    for each in made:
        if _is_header(each):
            for name in _BODIES & {*_fields(each)}:
                setattr(each, name, getattr(node, name))
    getattr(parent, field)[index : index + 1] = made or [ast.Pass()]


def _check_names(new: list[ast.stmt], module: ast.Module, edit: Edit) -> None:
    """Check that each name in the replacement is in the module, a builtin, or bound by the replacement."""
    known = {*dir(builtins)}
    for tree in (module, *new):
        for node in ast.walk(tree):
            if isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.Name) and (tree is module or isinstance(node.ctx, ast.Store)):
                known.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
                known.add(node.name)
    used = {node.id for each in new for node in ast.walk(each) if isinstance(node, ast.Name)}
    missing = {name for name in used - known if not name.startswith(_PREFIX)}
    assert not missing, f"{edit.new!r} uses {sorted(missing)}, which the module of {edit.function} does not have"


def _is_header(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return (
        isinstance(body, list)
        and len(body) == 1
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and body[0].value.value is ...
    )


def _variable(node: Any) -> str:
    """Return the name of a ``$name`` variable, or an empty string."""
    return node.id.removeprefix(_PREFIX) if isinstance(node, ast.Name) and node.id.startswith(_PREFIX) else ""


def _bind(name: str, value: Any, bound: Bound) -> bool:
    if name not in bound:
        bound[name] = value
        return True
    return _same(bound[name], value)


def _fields(node: ast.AST) -> list[str]:
    return [name for name, _ in ast.iter_fields(node)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, ast.AST):
        if type(one) is not type(other):
            return False
        return all(_same(getattr(one, name), getattr(other, name)) for name in _fields(one) if name not in _LAYOUT)
    return bool(one == other)


def _matches(pattern: Any, node: Any, bound: Bound) -> bool:
    if name := _variable(pattern):
        return isinstance(node, ast.expr) and _bind(name, node, bound)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_lists(pattern, node, bound)
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    if type(pattern) is not type(node):
        return False
    skipped = _LAYOUT | (_BODIES if _is_header(pattern) else set())
    return all(_matches(getattr(pattern, name), getattr(node, name), bound) for name in _fields(pattern) if name not in skipped)


def _match_lists(patterns: list[Any], nodes: list[Any], bound: Bound) -> bool:
    if patterns and isinstance(patterns[0], ast.keyword):
        return _match_keywords(patterns, nodes, bound)
    if patterns and isinstance(patterns[-1], ast.Starred) and (rest := _variable(patterns[-1].value)):
        fixed = len(patterns) - 1
        return len(nodes) >= fixed and _match_each(patterns[:-1], nodes[:fixed], bound) and _bind(rest, nodes[fixed:], bound)
    return _match_each(patterns, nodes, bound)


def _match_each(patterns: list[Any], nodes: list[Any], bound: Bound) -> bool:
    return len(patterns) == len(nodes) and all(_matches(one, node, bound) for one, node in zip(patterns, nodes, strict=True))


def _match_keywords(patterns: list[Any], nodes: list[Any], bound: Bound) -> bool:
    left = {node.arg: node for node in nodes}
    for pattern in patterns:
        found = left.pop(pattern.arg, None) if pattern.arg is not None else pattern
        if found is None or not (pattern is found or _matches(pattern.value, found.value, bound)):
            return False
    rest = [_variable(pattern.value) for pattern in patterns if pattern.arg is None]
    return _bind(rest[0], [*left.values()], bound) if rest else not left


def _filled(node: Any, bound: Bound) -> Any:
    """Return a copy of a replacement with its variables substituted."""
    if name := _variable(node):
        return _bound(name, bound)
    if isinstance(node, list):
        made: list[Any] = []
        for each in node:
            inner = each.value if isinstance(each, ast.Starred) or (isinstance(each, ast.keyword) and each.arg is None) else None
            value = _bound(name, bound) if (name := _variable(inner)) else None
            made += value if isinstance(value, list) else [_filled(each, bound)]
        return made
    if not isinstance(node, ast.AST):
        return node
    fields = {name: _filled(getattr(node, name, None), bound) for name in _fields(node)}
    if isinstance(getattr(node, "ctx", None), ast.Store):
        for value in fields.values():
            if isinstance(value, ast.Name):
                value.ctx = ast.Store()
    return type(node)(**fields)


def _bound(name: str, bound: Bound) -> Any:
    assert name in bound, f"${name} is in no pattern"
    return copy.deepcopy(bound[name])
