"""Public callables document what they do, their parameters, their result and their errors; ``docs/api`` lists all of them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import raystow
from raystow.cli.app import COMMANDS

MODULES = ("raystow", "raystow.dcp", "raystow.huggingface", "raystow.lightning", "raystow.ray_train", "raystow.trackers")
FRAMEWORKS = "raystow.deepspeed", "raystow.megatron", "raystow.torchtitan", "raystow.verl"
PAGES = sorted((Path(__file__).parents[3] / "docs" / "api").glob("*.md"))


def reference() -> dict[str, dict[str, Any]]:
    """Return the objects that the pages list, each with the options of its entry."""
    found = dict[str, dict[str, Any]]()
    for page in PAGES:
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text() + "\n", re.MULTILINE):
            found[name] = yaml.safe_load(options)["options"] if options.strip() else {}
    return found


def installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except raystow.MissingDependency:
        return False
    return True


MISSING = tuple(f"{module}." for module in FRAMEWORKS if not installed(module))
MODULES += tuple(module for module in FRAMEWORKS if installed(module))
REFERENCE = {name: options for name, options in reference().items() if not name.startswith(MISSING or "-")}
PUBLIC = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


def resolve(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def documented() -> dict[str, tuple[str, Callable[..., object] | None]]:
    """Return by name the docstring, and the function whose parameters it documents."""
    found = dict[str, tuple[str, Callable[..., object] | None]]()
    for name, options in REFERENCE.items():
        thing = resolve(name)
        doc = inspect.getdoc(thing) or ""
        has_init = inspect.isclass(thing) and "__init__" in vars(thing) and not issubclass(thing, BaseException)
        constructed = has_init and not dataclasses.is_dataclass(thing) and options.get("merge_init_into_class", True)
        found[name] = doc, thing.__init__ if constructed else thing if inspect.isfunction(thing) else None  # type: ignore[misc]
        for member in options.get("members") or ():
            value = inspect.getattr_static(thing, member)
            found[f"{name}.{member}"] = inspect.getdoc(value) or "", value if inspect.isfunction(value) else None
    return found


DOCUMENTED = documented()
RECORDS = [name for name, options in REFERENCE.items() if options.get("merge_init_into_class", True)]


def section(doc: str, *titles: str) -> str:
    """Return the text below the titles."""
    return "".join(re.findall(rf"^(?:{'|'.join(titles)}):\n((?:[ \t]+.*\n?|\n)+)", doc + "\n", re.MULTILINE))


def raises(function: Callable[..., object]) -> bool:
    """Return whether the body of the function itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def test_the_reference_lists_every_public_object() -> None:
    assert set(PUBLIC) <= REFERENCE.keys()


def test_the_index_has_a_line_for_every_name_and_command() -> None:
    """Under the link to the page that documents the name."""
    index = next(page for page in PAGES if page.stem == "index")
    listed = dict[str, list[str]]()
    for page, lines in re.findall(r"^## \[[^]]+\]\((\S+)\)\n((?:.*\n(?!## ))*)", index.read_text(), re.MULTILINE):
        entries = re.findall(r"^- ((?:`[\w. ]+`(?:, )?)+): \S.*$", lines, re.MULTILINE)
        assert len(entries) == lines.count("\n- ") + lines.startswith("- ")
        listed[page] = [name for entry in entries for name in re.findall(r"`([^`]+)`", entry)]
    commands = [f"raystow {command}" for group in COMMANDS.values() for command in group]
    assert listed.pop("../cli.md") == commands
    pages = {page.name: re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE) for page in PAGES if page != index}
    assert {page: sorted(names) for page, names in listed.items()} == {page: sorted(names) for page, names in pages.items()}


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_docstrings_are_complete(name: str) -> None:
    doc, function = DOCUMENTED[name]
    summary, _, rest = doc.partition("\n")
    assert summary.endswith(".")
    assert not rest or rest.startswith("\n"), "a blank line must follow the summary"
    if function is None:
        return
    signature, arguments = inspect.signature(function), section(doc, "Args")
    names = [parameter for parameter in signature.parameters if parameter != "self"]
    assert [parameter for parameter in names if not re.search(rf"^\s+{parameter}: \S", arguments, re.MULTILINE)] == []
    if str(signature.return_annotation) != "None" and function.__name__ != "__init__":
        assert section(doc, "Returns")
    if raises(function):
        assert section(doc, "Raises")


@pytest.mark.parametrize("name", [name for name in RECORDS if dataclasses.is_dataclass(resolve(name))])
def test_fields_of_dataclasses_are_documented(name: str) -> None:
    fields = section(inspect.getdoc(resolve(name)) or "", "Args", "Attributes")
    assert [field.name for field in dataclasses.fields(resolve(name)) if f"{field.name}: " not in fields] == []  # type: ignore[arg-type]
