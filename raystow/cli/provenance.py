"""Where a version comes from, as commands print it."""

from __future__ import annotations

from collections.abc import Iterator

from ..storage.versions.version import Version

_PACKAGE = "package "
_NAMED = ("python", "torch", "ray", "transformers", "cuda")  # packages that ``show`` prints; JSON has all


def lines(version: Version) -> Iterator[tuple[str, str]]:
    """Yield name and text of what is known of a version's origin."""
    found = version.provenance
    yield "resumed", f"from version {found['resumed']}" if "resumed" in found else ""
    yield "command", found.get("command", "")
    yield "commit", commit(version)
    yield "packages", ", ".join(f"{name} {found[_PACKAGE + name]}" for name in _NAMED if _PACKAGE + name in found)
    yield "hosts", found.get("hosts", "")
    yield "notes", ", ".join(f"{name} {value!s:.60}" for name, value in version.notes.items())


def commit(version: Version) -> str:
    """Return the git commit, and whether the working tree differed from it."""
    found = version.provenance
    changed = found.get("changed files", "0")
    return found.get("commit", "") + ("" if changed == "0" else f", with {changed} changed files")


def changes(before: Version, after: Version) -> dict[str, tuple[str, str]]:
    """Return what differs between the origins of two versions: of both, by name; "" for what one of them lacks."""
    texts = [{**one.provenance, **{f"note {name}": str(value) for name, value in one.notes.items()}} for one in (before, after)]
    names = sorted({*texts[0], *texts[1]} - {"run", "resumed"})
    found = {name: (texts[0].get(name, ""), texts[1].get(name, "")) for name in names}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
