"""Checks on the documents: links, words, lengths, tables and figures. ``make docs`` builds the site from them, strictly."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from helpers.retired_words import RETIRED

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
MOST_WORDS = 40_000
_LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_NUMBER = r"(?<![\w.-])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_FIGURE = re.compile(rf"({_NUMBER}(?:(?:,| to| and| or) {_NUMBER})*)\s?(ms/GB|GB/s|ms|s|GB|MB|MiB|GiB|%)(?![\w/])")
_SCALES = {
    "ms": (1, 1e3),
    "s": (1, 1e-3),
    "GB": (1, 1e-9),
    "MB": (1, 1e-6),
    "MiB": (2**-20,),
    "GiB": (2**-30,),
    "%": (1, 100),
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=name)


def prose(page: Path) -> str:
    """A page without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text()))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of its headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(f"{slug}_{i}" if i else slug for slug, count in found.items() for i in range(count + 1))


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_each_alert_has_a_runbook() -> None:
    """A page of the site, with an anchor. The site has a file for each page."""
    assert "\nuse_directory_urls: false" in (ROOT / "mkdocs.yml").read_text()
    (group,) = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "raystow.rules.yaml").read_text())["groups"]
    for rule in group["rules"]:
        found = re.fullmatch(
            r"https://raystow\.example\.com/([\w/-]+)\.html#([\w-]+)", rule["annotations"].get("runbook_url", "")
        )
        assert found, rule["alert"]
        assert found[2] in anchors(ROOT / "docs" / f"{found[1]}.md"), rule["alert"]


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())
    there = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(listed) == sorted(there)


def test_the_table_of_integrations_agrees_with_their_pages() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\((docs/\S+\.md)\S*\)[^|]* \| (\w+ [\d.]+) \| \[`(\w+\.py)`\]", readme, re.MULTILINE)
    assert len(rows) == readme.partition("| Integration |")[2].count("\n| [")
    for path, version, example in rows:
        page = (ROOT / path).read_text()
        assert re.search(rf"\b{re.escape(version)}(?![.\d]*\d)", page), version
        assert f"examples/{example})" in page, example


def test_the_named_tests_exist() -> None:
    named = {found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())}
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


@pages
def test_no_retired_words(page: Path) -> None:
    assert not RETIRED.findall(prose(page))


def test_the_documents_are_short() -> None:
    """By ``wc -w``: bars and rules of tables, code and links count as well."""
    words = {name(page): len(page.read_text().split()) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS
    for page, count in words.items():
        assert count <= 600 or not page.startswith("docs/design/"), page
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40


@pages
def test_code_is_narrow_enough_for_the_site(page: Path) -> None:
    if page.parent.name == "spec" or ROOT / "docs" not in page.parents:
        return
    blocks = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for kind, block in blocks if kind != "mermaid" for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tools"])
def test_no_retired_words_in_scripts(folder: str) -> None:
    for script in (ROOT / folder).glob("*.py"):
        for docstring in re.findall(r'"""(.*?)"""', script.read_text(), re.DOTALL):
            assert not RETIRED.findall(docstring), script


@pages
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text()
    if "<!-- table: " in text:
        filled = runpy.run_path(str(ROOT / "benchmarks" / "results_table.py"))["filled"]
        assert text == filled(text), "run benchmarks/results_table.py --write"


@pages
def test_cited_figures_are_in_the_result_files(page: Path) -> None:
    text = page.read_text()
    for paragraph, files in cited(text):
        there = [number for file in files.split() for number in numbers_of(file)]
        for figures, unit in _FIGURE.findall(paragraph):
            for figure in re.findall(_NUMBER, figures):
                assert occurs(figure, unit, there), f"{figure} {unit} is not in {files}"


def cited(text: str) -> Iterator[tuple[str, str]]:
    """The paragraphs, lists and tables of a document that a citation follows, each with the files that it names."""
    lines = text.splitlines()
    for end, line in enumerate(lines):
        if line.startswith("<!-- results: "):
            start = end
            while start and lines[start - 1].strip() and not lines[start - 1].startswith(("#", "<!--")):
                start -= 1
            assert start < end, "a citation follows its paragraph or table directly"
            yield "\n".join(lines[start:end]), line.removeprefix("<!-- results: ").removesuffix(" -->")


@cache
def numbers_of(file: str) -> tuple[float, ...]:
    """The numbers of a result file, those in its keys and settings included, without the single steps of a window."""
    return tuple(_leaves(json.loads((RESULTS / file).read_text())))


def _leaves(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not key.endswith(" windows"):
                yield from (float(number) for number in re.findall(r"\d+", key))
                yield from _leaves(inner)
    elif isinstance(value, list) and len(value) <= 20:
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def occurs(figure: str, unit: str, there: list[float]) -> bool:
    digits = len(figure.partition(".")[2])
    stated = float(figure.replace(",", ""))
    return any(abs(number * scale - stated) <= 0.5001 * 10**-digits for number in there for scale in _SCALES.get(unit, (1,)))


def test_a_wrong_figure_is_found() -> None:
    there = [*numbers_of("cold_start-2026-11-23.json")]
    assert occurs("3.3", "s", there)
    assert occurs("3,300", "ms", there)
    assert not occurs("3.7", "s", there)


def test_the_table_of_adopted_lines_is_counted() -> None:
    counted = runpy.run_path(str(ROOT / "benchmarks" / "adoption_lines.py"))
    text = (ROOT / "docs" / "comparison.md").read_text().partition("## Lines to adopt")[2]
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    expected = [[counted["added"](script, way) for way in counted["WAYS"].values()] for script in counted["SCRIPTS"]]
    assert [list(map(int, row)) for row in rows] == expected
    assert all(ours <= most for (ours, *_), most in zip(expected, (12, 10, 12), strict=True))
