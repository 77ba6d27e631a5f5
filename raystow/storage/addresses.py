"""Addresses of stores, and the local paths that cannot be mistaken for one.

A text that begins with ``/``, ``./``, ``../`` or ``~`` is a local path. Every other text is refused if it is no valid address and
looks like one: its first part, up to a slash, has a colon or a backslash, or is a known scheme before two slashes, or a host of a
cloud's store. So is a text with a variable that was not expanded, or with a space at an end.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .arguments import refused
from .errors import StateError

VALID = (
    "use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path, memory://name, "
    "or a path, which begins with / or ./ if it looks like an address"
)
_LOCAL_ONLY = "give a path on this machine, which begins with / if it looks like an address"
_SECRET = re.compile(r"[@?#]")
_LOCAL = re.compile(r"/|\.{1,2}(?:/|$)|~")
_ADDRESS = re.compile(r"(?:(s3|gs|az|memory)://(?!/)|(file):(?=/))(.*)", re.IGNORECASE | re.DOTALL)
_MISTAKES = {
    "begins or ends with a space": re.compile(r"\s|.*\s$", re.DOTALL),
    "is a path of Windows, which WSL has below /mnt": re.compile(r"[A-Za-z]:[\\/]|\\\\"),
    "has a variable that was not expanded": re.compile(r".*\$\{?[A-Za-z_]", re.DOTALL),
}
_SEPARATOR = r"(?::[/\\]*|[/\\]{2,})"
_WEB = rf"(?:https?{_SEPARATOR})?"
_MEANT = {
    rf"{_WEB}s3[.-][^/]*amazonaws\.com[^/]*/": "s3://",
    rf"{_WEB}([^/]+?)\.s3[.-][^/]*amazonaws\.com[^/]*": r"s3://\1",
    rf"{_WEB}storage\.(?:googleapis|cloud\.google)\.com/": "gs://",
    rf"{_WEB}([^/]+)\.storage\.googleapis\.com": r"gs://\1",
    rf"{_WEB}[^/]+\.(?:blob|dfs)\.core\.windows\.net/": "az://",
    rf"(?:abfs|wasb)s?{_SEPARATOR}([^/@]+)@[^/]+\.core\.windows\.net": r"az://\1",
    rf"(?:s3[an]?|minio|r2){_SEPARATOR}": "s3://",
    rf"gc?s{_SEPARATOR}": "gs://",
    rf"(?:az|azure|abfss?|wasbs?){_SEPARATOR}": "az://",
    rf"memory{_SEPARATOR}": "memory://",
    r"file//+": "file:///",
    r"file:": "./",
}
"""How addresses begin that are written for others, and what these begin with."""
_LIKE_ADDRESS = re.compile(rf"[^/]*[:\\]|(?:https?|hdfs|hf)//|{'|'.join(_MEANT)}", re.IGNORECASE)


def parse(text: str) -> tuple[str, str]:
    """Return the scheme of an address in lower case, and what follows its slashes; "" and the path for a local path.

    Raises ``StateError`` if it is neither, which says what was probably meant.
    """
    if _LOCAL.match(text):
        return "", text
    if mistake := _mistake(text):
        raise invalid(mistake, text)
    if found := _ADDRESS.fullmatch(text):
        return (found[1] or found[2]).lower(), found[3]
    if _LIKE_ADDRESS.match(text):
        raise invalid(f"is no address that raystow can use{_meant(text)}", text)
    return "", text


def local_path(name: str, value: object) -> Path:
    """Return the path that the argument ``name`` gives, with ``~`` replaced.

    Raises ``StateError`` if it is an address, looks like one, or is in the home folder of an unknown user.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise refused(name, value, "a path, as text")
    if not _LOCAL.match(text):
        wrong = _mistake(text) or ("is an address, not a local path" if _LIKE_ADDRESS.match(text) else "")
        if wrong:
            raise StateError(f"{name} {wrong}", subject=_shown(text), remedy=_LOCAL_ONLY)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # there is no such user
        raise StateError(str(error), subject=text, remedy="give the path without ~") from None


def invalid(what: str, text: str) -> StateError:
    """The error for an address that is not valid."""
    return StateError(what, subject=_shown(text), remedy=VALID)


def _mistake(text: str) -> str:
    return next((what for what, pattern in _MISTAKES.items() if pattern.match(text)), "")


def _shown(text: str) -> str:
    """An address for a message: without what may be someone's keys."""
    return "the address" if _SECRET.search(text) else text[:200]


def _meant(text: str) -> str:
    for pattern, beginning in _MEANT.items():
        if found := re.match(pattern, text, re.IGNORECASE):
            meant = found.expand(beginning) + text[found.end() :]
            return "" if _SECRET.search(meant) or meant == beginning else f"; did you mean {meant[:200]}?"
    return ""
