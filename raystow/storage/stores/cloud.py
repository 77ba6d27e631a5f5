"""A bucket that obstore alone reaches: what Azure Blob Storage and Google Cloud Storage have in common."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError

from ..errors import NotFound, StoreError, StoreUnavailable
from ..gc_pause import uncollected
from ..object_store import ObjectInfo, Tagged, Unfinished
from . import checks, forks
from .bucket import Bucket
from .request_limits import DEFAULT_LIMITS, RequestLimits
from .store_answers import CONDITIONAL_PUT

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion
    from obstore.store import ObjectStore as ObstoreClient

_DELETE_BATCH = 256  # Azure's limit
_CHUNK = 1 << 20
_NO_LIMIT = 1 << 20


METADATA = "http://169.254.169.254"
"""Where a machine in a cloud learns its own identity."""
_METADATA_SECONDS = 2.0


def require_metadata(url: str, subject: str, remedy: str) -> None:
    """Raise ``StoreError`` if no service answers at ``url``: obstore would try for minutes to get credentials from it."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), _METADATA_SECONDS).close()
    except (OSError, ValueError):
        raise StoreError("there are no credentials", subject=subject, remedy=remedy) from None


@dataclass(frozen=True)
class CloudClients:
    """``send`` is for uploads, ``fetch`` for reads and small requests, ``swap`` is one without any retry."""

    send: ObstoreClient
    fetch: ObstoreClient
    swap: ObstoreClient


class CloudStore(Bucket):
    """An object store whose conditional writes obstore supports. ``tag_field``: the tag, as obstore names it."""

    tag_field: ClassVar[Literal["e_tag", "version"]]

    def __init__(self, bucket: str, prefix: str = "", *, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        super().__init__(bucket, prefix, limits=limits)
        self._made: CloudClients | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def _client(self, options: Mapping[str, Any]) -> ObstoreClient:
        """Make a client with these ``client_options`` and ``retry_config``. Raises ``StoreError`` without credentials."""

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        subject, data = self._subject(key), bytearray()
        with self.answers.obstore_errors("GET", subject):
            answer = obstore.get(self._clients.fetch, self._below + key)
            size = answer.meta["size"]
            if size > max_bytes:
                raise checks.too_large(subject, size, max_bytes)
            for chunk in answer.stream(min_chunk_size=_CHUNK):
                data += memoryview(chunk)
                if len(data) > size:
                    break
        if len(data) != size:
            raise StoreUnavailable(f"GET returned {len(data)} bytes of {size}", subject=subject, remedy="try again")
        return Tagged(bytes(data), self._required_tag(answer.meta, "GET", subject))

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """As the protocol says. Sent once and never again: after a lost answer a repeated request would lose against itself."""
        subject = self._subject(key)
        mode: PutMode = "create" if tag is None else self._with_tag(tag)
        try:
            with self.answers.obstore_errors(CONDITIONAL_PUT, subject):
                result = obstore.put(self._clients.swap, self._below + key, data, mode=mode, use_multipart=False)
        except NotFound:
            # The object that carried the tag is gone.
            raise checks.stale(subject) from None
        return self._required_tag(result, CONDITIONAL_PUT, subject)

    def _with_tag(self, tag: str) -> UpdateVersion:
        version: UpdateVersion = {}
        version[self.tag_field] = tag
        return version

    def _required_tag(self, described: Mapping[str, Any], operation: str, subject: str) -> str:
        tag: str | None = described[self.tag_field]
        if not tag:
            raise StoreUnavailable(
                f"{operation} failed: there is no tag in the answer", subject=subject, remedy=self.answers.later
            )
        return tag

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        subject = f"{self.uri}/{checks.checked_prefix(prefix)}"
        # obstore lists folders: what follows the last slash is compared here.
        folder, last = (self._below + prefix).rpartition("/")[0], ""
        with self.answers.obstore_errors("LIST", subject):
            for page in obstore.list(self._clients.fetch, folder or None):
                for entry in page:
                    path = entry["path"]
                    if path <= last:  # it would also let a listing go on for ever
                        raise StoreError("LIST does not give keys in their order", subject=subject, remedy="use another store")
                    last, key = path, path[len(self._below) :]
                    # Objects of others are neither read nor deleted.
                    if key.startswith(prefix) and checks.is_key(key):
                        yield ObjectInfo(key, entry["size"], entry["last_modified"].timestamp())

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := [self._below + checks.checked_key(key) for key in islice(remaining, _DELETE_BATCH)]:
            try:
                with self.answers.obstore_errors("DELETE", self.uri):
                    obstore.delete(self._clients.fetch, batch)
            except NotFound:  # of one: obstore does not report the others
                for path in batch:
                    with (
                        contextlib.suppress(NotFound),
                        self.answers.obstore_errors("DELETE", f"{self.scheme}://{self._bucket}/{path}"),
                    ):
                        obstore.delete(self._clients.fetch, path)

    def unfinished(self) -> Iterator[Unfinished]:
        """Nothing: obstore does not list uploads in parts. They are never visible as objects."""
        return iter(())

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Do nothing, since ``unfinished`` lists nothing."""

    @property
    def _clients(self) -> CloudClients:
        forks.refuse_forked(self.uri)
        with self._lock:
            if self._made is None:
                self._made = self._connect()
            return self._made

    @uncollected()
    def _connect(self) -> CloudClients:
        forks.mark_used()
        limits = self._limits
        timeouts = {
            "connect_timeout": timedelta(seconds=limits.connect_seconds),
            "timeout": timedelta(seconds=limits.request_seconds),
        }
        # The stall limit runs from the start of a request to the first byte of its answer, the time to send the body included,
        # and would fail every upload over a slow line: uploads have the limit of the whole request only.
        reading = timeouts | {"read_timeout": timedelta(seconds=limits.stall_seconds)}
        # By time and not by number: a server that is busy is so for a while, and answers at once.
        retry = {"max_retries": _NO_LIMIT, "retry_timeout": timedelta(seconds=limits.retry_seconds)}
        try:
            return CloudClients(
                send=self._client({"client_options": timeouts, "retry_config": retry}),
                fetch=self._client({"client_options": reading, "retry_config": retry}),
                swap=self._client({"client_options": reading, "retry_config": retry | {"max_retries": 0}}),
            )
        except (BaseError, OSError, ValueError) as error:  # their texts may hold parts of credentials
            what = f"the configuration does not make a client: {type(error).__name__}"
            raise StoreError(what, subject=self.uri, remedy=self.answers.credentials) from None
