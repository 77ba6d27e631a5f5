"""Finds the version that a user asks for: by its id, by a pin, by its step, the latest one, or by the ``Version`` itself."""

from __future__ import annotations

import re

from ..arguments import refused
from ..errors import NotFound, StateError
from ..format.root import Entry, Root
from .version import Version

LATEST = "latest"

VersionSelector = int | str | Version
"""A version's id, the name of a pin, ``"step:60"`` (the newest version of that step), ``"latest"``, or a version."""

_STEP = "step:"
_NUMBER = re.compile(f"({_STEP})?([0-9]{{1,19}})", re.ASCII)
_LISTED = 5  # versions and pins that an error lists


def selector_text(which: VersionSelector, repository_id: str) -> str:
    """A selector as text that is equal for equal selectors: ``7``, a pin, ``step:60`` or ``latest``.

    Raises ``StateError`` if it is none, or a version of another repository.
    """
    if isinstance(which, Version):
        if which.repository_id != repository_id:
            what = f"belongs to repository {which.repository_id}, not to {repository_id}"
            raise StateError(what, subject=repr(which), remedy="pass a version of this repository")
        return str(which.id)
    if type(which) is int and which >= 0:
        return str(which)
    if isinstance(which, str) and (number := _NUMBER.fullmatch(which)):
        return f"{number[1] or ''}{int(number[2])}"
    if isinstance(which, str) and which and not which.startswith(_STEP):
        return which
    raise refused("version", which, 'an id, the name of a pin, "step:60", "latest" or a Version')


def check_version(version: Version, repository_id: str) -> None:
    """``StateError`` for what is no ``Version`` of this repository."""
    if not isinstance(version, Version):
        raise refused("version", version, "a raystow.Version, such as repository.version(7)")
    selector_text(version, repository_id)


def is_reserved(name: str) -> bool:
    """Whether a selector of this text is not the name of a pin."""
    return name == LATEST or name.startswith(_STEP) or _NUMBER.fullmatch(name) is not None


def select(root: Root, which: VersionSelector, uri: str) -> Entry:
    """The entry of the version that is asked for. ``uri``: of the repository, for errors. A rolled-back version is found by its
    id or a pin only.

    Raises ``StateError`` as ``selector_text`` does, and ``NotFound`` if there is no such version.
    """
    text = selector_text(which, root.repository)
    number = _NUMBER.fullmatch(text)
    if text == LATEST:
        what, found = "version yet", list(root.versions)
    elif number is None:
        what, found = f"pin {text!r}", [entry for entry in root.listed if entry.id == root.pins.get(text)]
    elif number[1]:
        what, found = f"version of step {number[2]}", [entry for entry in root.versions if entry.step == int(number[2])]
    else:
        what, found = f"version {text}", [entry for entry in root.listed if entry.id == int(text)]
    if found:
        return found[-1]
    missing = f"version {text} was dropped" if text in (str(one.id) for one in root.dropped) else f"there is no {what}"
    if rolled_back := [str(one.entry.id) for one in root.rolled_back if text == f"{_STEP}{one.entry.step}"]:
        missing += f"; rolled-back ones are found by their ids: {', '.join(rolled_back)}"
    raise NotFound(missing, subject=uri, remedy=_existing(root))


def _existing(root: Root) -> str:
    """The remedy: what can be selected."""
    if not root.versions:
        return "the first save creates a version"
    newest = ", ".join(f"{entry.id} (step {entry.step})" for entry in root.versions[-_LISTED:])
    pins = ", ".join(sorted(root.pins)[:_LISTED])
    listed = f"the newest versions are {newest}" + (f", and pins are {pins}" if pins else "")
    return f"{listed}; `raystow ls` lists all"
