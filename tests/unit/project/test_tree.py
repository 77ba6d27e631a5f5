"""Checks on the package tree: the sizes and names of files, the names of classes, and how often ``Any`` is used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import count_concepts
from helpers.retired_words import RETIRED

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "raystow"
FOLDERS = ("raystow", "tests", "benchmarks", "examples", "tools")

MOST_LINES = 500
LONGEST_TEST_NAME = 60
NO_SUBJECT = re.compile(r"test_(what|who|whoever|whatever|nothing_but)_")
MOST_ANY = 150
"""How often the word ``Any`` occurs in ``raystow``, imports and docstrings included, at most: for torch and Parquet."""

MOST_PRIVATE, MOST_PATCHES = 59, 119
"""Uses of private names of ``raystow`` in tests, and calls of ``setattr`` on a patch."""

PUBLIC_TWICE = {"Checkpointer", "Checkpointing"}
"""Public classes of integrations, which have the name that users of that library expect."""

NOUNS = {"lightning", "finding", "pricing", "housekeeping", "formatting", "pending", "coding", "packing", "staging", "ring"}
"""Words in -ing that are nouns of the field (or adjectives, for ``pending``); all others count as verbs."""


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def sources() -> dict[Path, str]:
    return {path.relative_to(ROOT): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_file_is_longer_than_500_lines() -> None:
    """Tests and scripts are included."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in paths}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name for text in sources().values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    )
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated - PUBLIC_TWICE == set()


def test_no_module_is_named_by_a_verb() -> None:
    """A name may end in -ing only if its last word is a noun of the field."""
    names = {part.removesuffix(".py") for path in sources() for part in path.parts}
    assert {name for name in names if name.endswith("ing")} - {name for name in names if name.split("_")[-1] in NOUNS} == set()


def test_docstrings_and_comments_use_no_retired_words() -> None:
    """Names of code between backticks are not counted."""
    found = {
        str(path): words
        for path, source in sources().items()
        if (words := [word for text in prose(source) for word in RETIRED.findall(re.sub(r"`[^`]*`", "", text))])
    }
    assert found == {}


def test_any_is_used_sparingly() -> None:
    count = sum(len(re.findall(r"\bAny\b", text)) for text in sources().values())
    assert count <= MOST_ANY


def test_no_number_is_drawn_from_default_generators() -> None:
    """They are those of the training, whose resume must end in the same bits."""
    drawing = {"bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"}
    in_place = {"bernoulli_", "exponential_", "normal_", "random_", "uniform_"}
    calls = [
        (str(path), node)
        for path, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in drawing | in_place
    ]
    assert "raystow/workers/gpu/codec_choice.py" in {path for path, _ in calls}
    assert [f"{path}:{node.lineno}" for path, node in calls if "generator" not in {word.arg for word in node.keywords}] == []


def test_packages_of_npm_are_pinned_exactly() -> None:
    """Those that the Makefile installs."""
    packages = [
        word for line in (ROOT / "Makefile").read_text().splitlines() if "npm install" in line for word in line.split()[-1:]
    ]
    assert packages
    assert [package for package in packages if not re.fullmatch(r"[a-z/@-]+@\d+\.\d+\.\d+", package)] == []


def test_names_of_tests_are_short_statements() -> None:
    """A name states the behaviour: a subject, a verb and the condition."""
    named = {
        name: str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert {name: path for name, path in named.items() if len(name) > LONGEST_TEST_NAME or NO_SUBJECT.match(name)} == {}


def test_tests_use_no_retired_words() -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (words := [word for text in prose(path.read_text()) for word in RETIRED.findall(re.sub(r"`[^`]*`", "", text))])
    }
    assert found == {}


def test_uses_of_private_names_and_patches_are_found() -> None:
    source = """
import os
from raystow.a import _made, public
class A:
    def run(self, patch):
        os._exit(self._own)
        patch.setattr(public, "_made", self.a._made)
        public.b()._made
"""
    tree = ast.parse(source)
    assert count_concepts.private_uses(tree, {"_made", "_own", "_exit"}) == ["_made"] * 4
    assert count_concepts.patches(tree) == 1


def test_constraints_pin_nothing_that_torch_pins() -> None:
    """The torch of PyPI pins Triton and CUDA's libraries, one from elsewhere pins none: then the conflict is not seen."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    assert {line.partition("==")[0] for line in lines if line} == {"torch", "ray"}


def test_no_test_module_imports_another_one() -> None:
    """What two of them need is in a helper module. Also holds for programs in texts, which tests run."""
    sources = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    imports = re.compile(r"^[ ]*(?:from|import) (?:\w+\.)*test_\w+", re.MULTILINE)
    assert {str(path): found for path, text in sources.items() if (found := imports.findall(text))} == {}


def test_tests_rarely_use_private_names_or_patches() -> None:
    """A test gets what it replaces by a parameter, from a fake of ``tests/helpers``, or from the environment."""
    tree = count_concepts.Revision.checkout(("raystow", "tests"))
    assert sum(map(len, tree.private_uses.values())) <= MOST_PRIVATE, tree.private_uses
    assert sum(tree.patches.values()) <= MOST_PATCHES, tree.patches
