"""Reaches Ray Train's storage as Train's pyarrow file system does: ``RunConfig(storage_path=, storage_filesystem=)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...storage.errors import StateError
from ...storage.object_store import ObjectStore
from ...storage.stores import open_store
from ...storage.stores.settings import S3Overrides

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
_SUBJECT = "RunConfig(storage_path=, storage_filesystem=)"
_REFUSED = {
    "s3": ("anonymous", "role_arn", "proxy_options"),
    "gcs": ("anonymous", "access_token", "target_service_account", "endpoint_override"),
}
_REMEDY = "set it in the environment, or pass uri=; only pointers will be in Train's storage"


def repository_in(filesystem: FileSystem, folder: str) -> str:
    """Return the address of the repository in a run's folder. Raises ``StateError`` if the file system has no address."""
    kind = filesystem.type_name
    if kind not in _SCHEMES:
        what = f"its file system, of type {kind!r}, does not tell where a repository can be"
        raise StateError(what, subject="RunConfig(storage_path=)", remedy="pass uri=; only pointers will be in Train's storage")
    return f"{_SCHEMES[kind]}{folder}/raystow"


def store_in(filesystem: FileSystem, address: str) -> ObjectStore:
    """Open the store at an address of a file system, with its endpoint, region and credentials.

    Raises:
        StateError: The file system is reached in a way that raystow cannot take over; the message names it.
    """
    kind = filesystem.type_name
    if kind not in _REFUSED:
        return open_store(address)
    fields = _fields(filesystem)
    for name in _REFUSED[kind]:
        value = fields.get(name)
        if any(value.get(part) for part in ("host", "username")) if isinstance(value, dict) else value:
            raise StateError(f"raystow cannot take over {name} of Train's file system", subject=_SUBJECT, remedy=_REMEDY)
    return open_store(address, overrides=_overrides(fields)) if kind == "s3" else open_store(address)


def _fields(filesystem: FileSystem) -> Mapping[str, Any]:
    """The arguments of the file system: pyarrow shows them to pickle alone."""
    try:
        fields = filesystem.__reduce__()[1][0]
        fields["endpoint_override"]
    except (LookupError, TypeError) as error:
        what = f"this version of pyarrow does not tell how its {type(filesystem).__name__} reaches its server"
        raise StateError(what, subject=_SUBJECT, remedy="pass uri=; only pointers will be in Train's storage") from error
    return dict(fields)


def _overrides(fields: Mapping[str, str | None]) -> S3Overrides:
    endpoint = fields["endpoint_override"] or ""
    if endpoint and "://" not in endpoint:
        endpoint = f"{fields.get('scheme') or 'https'}://{endpoint}"
    keys = {"access_key": fields.get("access_key"), "secret_key": fields.get("secret_key"), "token": fields.get("session_token")}
    return S3Overrides(
        endpoint=endpoint,
        region=fields.get("region") or "",
        virtual=bool(fields.get("force_virtual_addressing")),
        certificates=fields.get("tls_ca_file_path") or "",
        credentials={name: value for name, value in keys.items() if value} if keys["access_key"] else {},
    )
