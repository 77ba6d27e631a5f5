"""The stores, and the function that opens one by its address.

Each store is imported only when its address needs it: a local folder needs no boto3.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from ..addresses import VALID, local_path, parse
from ..errors import StateError
from ..object_store import ObjectStore
from .settings import JobSettings, S3Overrides

__all__ = ["open_store"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_KEYS = re.compile(r"[@:?#%=+]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONFIGURATION = {"s3": "AWS", "az": "Azure", "gs": "Google"}


def open_store(
    uri: str,
    *,
    kept: bool = False,
    settings: JobSettings | None = None,
    overrides: S3Overrides | None = None,
) -> ObjectStore:
    """Open the store at ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///path``, a plain
    path, or ``memory://name`` (this process only).

    Nothing is contacted, created or checked yet. Raises ``StateError`` for an invalid address. ``kept``: see ``LocalStore``.
    ``settings``: of a bucket; None for those of this process's environment, with ``overrides`` for S3.
    """
    if not uri or any(ord(character) < 32 for character in uri):
        raise _bad("an address must not be empty or hold control characters", "the address")
    scheme, rest = parse(uri)
    if scheme == "":
        return _local(str(local_path("uri", uri)), kept)
    if scheme == "file":
        return _local(_file_path(rest), kept)
    return _memory(rest) if scheme == "memory" else _in_bucket(scheme, rest, settings, overrides)


def _local(path: str, kept: bool) -> ObjectStore:
    from .local import LocalStore

    try:
        return LocalStore(path, kept=kept)
    except ValueError as error:
        raise _bad(f"no path can have these characters: {error}", "the address") from None


def _file_path(rest: str) -> str:
    host, _, path = rest.removeprefix("//").partition("/")
    if host not in ("", "localhost") or not {"?", "#"}.isdisjoint(path):
        raise _bad("a file address has three slashes, no host, and its ? and # written as %3F and %23", "file:")
    return unquote(f"/{path}", errors="surrogateescape")  # as ``LocalStore.uri`` writes bytes that are not UTF-8


def _in_bucket(kind: str, rest: str, settings: JobSettings | None, overrides: S3Overrides | None) -> ObjectStore:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        if _KEYS.search(bucket):  # these characters separate someone's keys from a bucket: no message repeats them
            where = f"the {_CONFIGURATION[kind]} configuration, not into the address"
            raise _bad(f"this is not a bucket name; credentials belong into {where}", f"{kind}://")
        rule = "it has 3 to 255 letters, digits, dots, hyphens and underscores, and begins and ends with a letter or digit"
        raise StateError(f"{bucket[:300]!r} is no bucket name: {rule}", subject=f"{kind}://", remedy="correct the address")
    if any("\ud800" <= character <= "\udfff" for character in prefix):
        raise _bad("a prefix must be valid UTF-8", f"{kind}://{bucket}")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise _bad("a prefix must not hold empty parts, . or ..", f"{kind}://{bucket}/{prefix}")
    if kind == "az":
        from .azure import AzureStore

        return AzureStore(bucket, prefix, given=settings)
    if kind == "gs":
        from .gcs import GcsStore

        return GcsStore(bucket, prefix, given=settings)
    from .s3 import S3Store

    return S3Store(bucket, prefix, given=settings, overrides=overrides or S3Overrides())


def _memory(name: str) -> ObjectStore:
    if not _NAME.fullmatch(name):
        raise _bad("a memory store has a plain name", "memory://")
    from .memory import MemoryStore

    return MemoryStore.named(name)


def _bad(what: str, subject: str) -> StateError:
    return StateError(what, subject=subject, remedy=VALID)
