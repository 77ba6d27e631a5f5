"""Checks that all stores share, so that a caller sees the same errors on each.

Keys are narrow on purpose: no part starts with a dot, so a store on a disk stays inside its folder (``..``), and dotted names
(locks, temporary files) belong to the store.
"""

from __future__ import annotations

import re

from ..errors import Damaged, NotFound, PreconditionFailed, StoreError

FREES_SPACE = "`raystow gc --grace 0s` deletes dropped versions at once, `raystow prune` drops more"
"""A remedy for a store without space."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,199}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*(?:{_PART})?")
_LONGEST_KEY = 512
_REMEDY = "make keys with raystow.storage.format.keys only"


def is_key(key: str) -> bool:
    """Whether ``key`` could have been written through a store."""
    return len(key) <= _LONGEST_KEY and _KEY.fullmatch(key) is not None


def checked_key(key: str) -> str:
    """``key``, or a ``StoreError`` if it is not one."""
    if not is_key(key):
        raise StoreError(f"not a key: {key[:_LONGEST_KEY]!r}", remedy=_REMEDY)
    return key


def checked_prefix(prefix: str) -> str:
    """``prefix``, or a ``StoreError`` if no key can start with it."""
    if len(prefix) > _LONGEST_KEY or not _PREFIX.fullmatch(prefix):
        raise StoreError(f"not a prefix of keys: {prefix[:_LONGEST_KEY]!r}", remedy=_REMEDY)
    return prefix


def checked_range(subject: str, start: int, length: int) -> None:
    """Ranges come from manifests, so a negative one is damage and not the caller's mistake."""
    if start < 0 or length < 0:
        raise Damaged(f"no range can start at {start} and have {length} bytes", subject=subject)


def too_large(subject: str, size: int | str, max_bytes: int) -> Damaged:
    """The object holds more than the caller is ready to take into memory."""
    return Damaged(f"the object has {size} bytes where at most {max_bytes} are possible", subject=subject,
                   remedy="this is not what was written: use another version")  # fmt: skip


def ends_early(subject: str, start: int, length: int) -> Damaged:
    """The object ends before the range does."""
    return Damaged(f"the object ends before bytes {start} to {start + length}", subject=subject,
                   remedy="it was cut: use another version")  # fmt: skip


def missing(subject: str) -> NotFound:
    """There is no such object."""
    return NotFound("there is no such object", subject=subject)


def stale(subject: str) -> PreconditionFailed:
    """A conditional write came too late."""
    return PreconditionFailed("the object is not what the caller last read", subject=subject, remedy="read it again")
