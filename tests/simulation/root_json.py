"""Queries of the parsed JSON of ``root.json``."""

from __future__ import annotations

from typing import Any

Attempt = tuple[int, str]
Json = dict[str, Any]

EMPTY: Json = {"dropped": [], "rewrites": [], "verified": 0, "rollbacks": 0, "rolled_back": []}
"""Defaults of fields that may be absent."""


def is_as_much(entry: Json, listed: Json | None) -> bool:
    """Return whether an entry is a rewrite of a listed version with all of its groups."""
    if listed is None or (entry.get("saved") or entry["attempt"]) != (listed.get("saved") or listed["attempt"]):
        return False
    return not entry.get("groups") or entry["groups"] == listed.get("groups")


def listed_in(root: Json) -> list[Json]:
    """Return the live and the rolled-back versions, oldest first."""
    return sorted((*root["versions"], *root["rolled_back"]), key=lambda entry: entry["id"])


def entry_of(one: Json) -> Json:
    """Return the entry of a version without the fields of a rollback."""
    return {name: value for name, value in one.items() if name not in ("after", "at")}


def live_in(root: Json) -> set[Attempt]:
    return attempts_of(root["versions"])


def attempts_of(entries: list[Json]) -> set[Attempt]:
    return {(entry["id"], entry["attempt"]) for entry in entries}


def folder_of(entry: Json) -> str:
    return f"versions/{entry['id']:08d}-{entry['attempt']}/"
