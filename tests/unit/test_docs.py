"""The documents hang together: links and anchors lead somewhere, the site has every page, the tests that they name are there.

``make docs`` builds the site strictly; this is what of it takes no time.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
_LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text()))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Those of its headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(f"{slug}_{i}" if i else slug for slug, count in found.items() for i in range(count + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())
    there = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(listed) == sorted(there)


def test_the_tests_that_are_named_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())}
    assert len(named) > 20
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
