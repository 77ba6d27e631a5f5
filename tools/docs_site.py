"""MkDocs hook: add a page for each file and folder outside docs/ that a document links to.

In a checkout and on the source host, a link to ``../examples/read_without_ray.py`` opens that file. On the site it opens a page
with the file's text, so links work on any host and show the source of the same version.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
_NAMED_FENCE = re.compile(r"^```(\w+) ([\w.-]+)$", re.MULTILINE)  # ```json root.json: tests find examples by these names
_PAGES = "source"  # their folder on the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder outside docs/ that a document or such a page links to."""
    root = Path(config.docs_dir).parent
    pending = [(path, (root / path).read_text()) for path in (f"docs/{file.src_uri}" for file in files.documentation_pages())]
    while pending:
        path, text = pending.pop()
        for linked in _without_page(root, path, text):
            if files.get_file_from_path(_page(linked)) is None and (root / linked).exists():
                content = _content(root, linked)
                page = File.generated(config, _page(linked), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(page)
                if linked.endswith(".md") or (root / linked).is_dir():
                    pending.append((linked, content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to those pages, and use the names of examples as titles."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{_PAGES}/") if uri.startswith(f"{_PAGES}/") else f"docs/{uri}"

    def pointed(found: re.Match[str]) -> str:
        target = _resolved(path, found[1])
        for site in (target.removeprefix("docs/"), _page(target)):
            if files.get_file_from_path(site) is not None:
                return f"]({posixpath.relpath(site, posixpath.dirname(uri))}{found[2] or ''})"
        return found[0]

    return _NAMED_FENCE.sub(r'```\1 title="\2"', _LINK.sub(pointed, markdown))


def _without_page(root: Path, path: str, text: str) -> list[str]:
    """Linked files outside docs/, and linked folders: MkDocs creates no pages for them."""
    linked = [_resolved(path, found[1]) for found in _LINK.finditer(text)]
    return [target for target in linked if not target.startswith("docs/") or (root / target).is_dir()]


def _resolved(path: str, link: str) -> str:
    """Resolve a link in a file to a path from the top of the checkout."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _page(path: str) -> str:
    return f"{_PAGES}/{path}" if path.endswith(".md") else f"{_PAGES}/{path}.md"


def _content(root: Path, path: str) -> str:
    if (root / path).is_dir():
        inside = sorted(
            str(file.relative_to(root)) for file in (root / path).rglob("*") if file.is_file() and file.suffix != ".pyc"
        )
        return f"# {path}\n\n" + "".join(f"- [{file}]({posixpath.relpath(file, posixpath.dirname(path))})\n" for file in inside)
    text = (root / path).read_text()
    if path.endswith(".md"):
        return text
    fence = "`" * 4
    return f"# {path}\n\n{fence}{Path(path).suffix.removeprefix('.')}\n{text}\n{fence}\n"
