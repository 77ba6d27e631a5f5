"""Makes every key in a repository, from checked numbers and names; none is ever taken from storage."""

from __future__ import annotations

import re

from ..errors import Damaged
from ..limits import MAX_INTEGER

MARKER = "raystow.json"
ROOT = "root.json"
VERSIONS = "versions/"
LEASES = "leases/"
SEGMENTS = "segments/"
PROBE = "probe/"

PlaceInAttempt = tuple[int] | tuple[int, str, int]
"""Of a fragment its node, of a pack its node, group and number."""

_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,31}")
_OBJECT = re.compile(r"versions/([0-9]{8,19})-([0-9a-f]{16})/([^/]+)")
_FRAGMENT = re.compile(r"tensors-([0-9]{5,9})\.parquet")
_PACK = re.compile(r"([a-z][a-z0-9_]{0,31})-([0-9]{5,9})-([0-9]{5,9})\.pack")
_SEGMENT = re.compile(r"segments/([0-9]{8,19})-([0-9a-f]{16})/(?:segment\.(?:json|sig)|entries-[0-9]{5,9}\.bin)")
_LEASE = re.compile(r"leases/([0-9]{8,19})-([0-9a-f]{16})-[0-9a-f]{16}\.json")
_TRIAL = re.compile(r"probe/(?:[0-9a-f]{16}|doctor-[0-9a-f]{16}/.+)")
_FOLDER = re.compile(r"(?:(?:versions|segments)(?:/[0-9]{8,19}-[0-9a-f]{16})?|leases|probe(?:/doctor-[0-9a-f]{16}(?:/.+)?)?)?")


def is_place(number: int, attempt: str, *, below: int = MAX_INTEGER) -> bool:
    """Whether an attempt at a version, or at a segment, can have this number and name. ``below``: the next number."""
    return 1 <= number < below and _ATTEMPT.fullmatch(attempt) is not None


def prefix(version: int, attempt: str) -> str:
    """The folder of one attempt: ``versions/00000007-0123456789abcdef/``."""
    if not is_place(version, attempt):
        raise Damaged(f"not a version id and attempt: {version!r}, {attempt!r}")
    return f"{VERSIONS}{version:08d}-{attempt}/"


def record(version: int, attempt: str) -> str:
    """The version record."""
    return prefix(version, attempt) + "version.json"


def signature(version: int, attempt: str) -> str:
    """The signature of the version record."""
    return prefix(version, attempt) + "version.sig"


def fragment(version: int, attempt: str, node: int) -> str:
    """The manifest fragment that node number ``node`` of the attempt wrote."""
    return f"{prefix(version, attempt)}tensors-{_count(node):05d}.parquet"


def pack(version: int, attempt: str, node: int, group: str, number: int) -> str:
    """Pack ``number`` of ``group`` (``weights``, ``optimizer``) that node number ``node`` wrote."""
    if not _GROUP.fullmatch(group):
        raise Damaged(f"not a pack group: {group!r}")
    return f"{prefix(version, attempt)}{group}-{_count(node):05d}-{_count(number):05d}.pack"


def place_of(key: str) -> PlaceInAttempt | None:
    """The rest of a key: of a fragment the node, of a pack node, group and number; else None."""
    name = key.rpartition("/")[2]
    if match := _FRAGMENT.fullmatch(name):
        return (int(match[1]),)
    match = _PACK.fullmatch(name)
    return (int(match[2]), match[1], int(match[3])) if match else None


def attempt_of(key: str) -> tuple[int, str] | None:
    """The version id and attempt of a record, signature, fragment or pack; None for other keys."""
    match = _OBJECT.fullmatch(key)
    if match is None or not (match[3] in ("version.json", "version.sig") or place_of(key)):
        return None
    found = int(match[1]), match[2]
    return found if is_place(*found) and key.startswith(prefix(*found)) else None


def lease(version: int, attempt: str, token: str) -> str:
    """The lease of a reader on a version."""
    if not _ATTEMPT.fullmatch(token):
        raise Damaged(f"not a token: {token!r}")
    return f"{LEASES}{prefix(version, attempt)[len(VERSIONS) : -1]}-{token}.json"


def leased(key: str) -> tuple[int, str] | None:
    """The version id and attempt of a lease; None for other keys."""
    match = _LEASE.fullmatch(key)
    found = (int(match[1]), match[2]) if match else None
    return found if found and is_place(*found) else None


def segment(number: int, attempt: str) -> str:
    """The folder of a segment of the step journal."""
    if not is_place(number, attempt):
        raise Damaged(f"not a number and attempt of a segment: {number!r}, {attempt!r}")
    return f"{SEGMENTS}{number:08d}-{attempt}/"


def segment_record(number: int, attempt: str) -> str:
    """The record of a segment."""
    return segment(number, attempt) + "segment.json"


def segment_signature(number: int, attempt: str) -> str:
    """The signature of a segment's record."""
    return segment(number, attempt) + "segment.sig"


def segment_entries(number: int, attempt: str, rank: int) -> str:
    """The entries of one rank in a segment."""
    return f"{segment(number, attempt)}entries-{_count(rank):05d}.bin"


def segment_of(key: str) -> tuple[int, str] | None:
    """The number and attempt of a segment's object; None for other keys."""
    match = _SEGMENT.fullmatch(key)
    found = (int(match[1]), match[2]) if match else None
    return found if found and is_place(*found) and key.startswith(segment(*found)) else None


def trial(token: str) -> str:
    """An object that tests the store, and is removed at once."""
    if not _ATTEMPT.fullmatch(token):
        raise Damaged(f"not a token: {token!r}")
    return f"{PROBE}{token}"


def is_trial(key: str) -> bool:
    """Whether the key is that of an object that tests the store."""
    return _TRIAL.fullmatch(key) is not None


def in_layout(key: str) -> bool:
    """Whether the key is that of an object or a folder of a repository. Others below its address belong to other programs or to
    repositories within it, and are never deleted."""
    found = key in (MARKER, ROOT) or _FOLDER.fullmatch(key) or is_trial(key) or leased(key) or attempt_of(key) or segment_of(key)
    return bool(found)


def _count(number: int) -> int:
    if not 0 <= number < 10**9:
        raise Damaged(f"not an object number: {number!r}")
    return number
