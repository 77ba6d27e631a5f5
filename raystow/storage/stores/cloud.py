"""A bucket that obstore alone reaches: what Azure Blob Storage and Google Cloud Storage have in common."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError

from ..errors import NotFound, StoreError, StoreUnavailable
from ..object_store import ObjectInfo, Tagged, Unfinished
from . import checks
from .attempts import FAILURES
from .awaited import each
from .bucket import Bucket, BucketClients, renewing
from .request_limits import ONCE
from .settings import StoreSettings, place_named
from .store_answers import CONDITIONAL_PUT

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, UpdateVersion

_CHUNK = 1 << 20

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


class CloudStore(Bucket[BucketClients]):
    """An object store whose conditional writes obstore supports. ``client``: obstore's class. ``endpoint_field`` and
    ``tag_field``: its names of an endpoint in the configuration, and of the tag. ``variables``: those of the environment that
    obstore reads by itself, by its name of the field."""

    client: ClassVar[Any]
    endpoint_field: ClassVar[str]
    tag_field: ClassVar[Literal["e_tag", "version"]]
    variables: ClassVar[Mapping[str, Sequence[str]]]
    most_deleted = 256  # Azure's limit

    @abstractmethod
    def _configuration(self) -> dict[str, object]:
        """What obstore needs. Raises ``StoreError`` if there are no credentials."""

    def _configured(self, anew: bool) -> StoreSettings:
        config = {name: str(value) for name, value in self._configuration().items()}
        if anew:  # clients read files and logins again
            with self._lock:
                self._made = None
        place = place_named(self.scheme, config.get(self.endpoint_field), config.get("account_name"))
        return StoreSettings(place, credentials=config)

    def _from_environment(self) -> dict[str, object]:
        """The fields that the environment sets."""
        set = {field: next(filter(None, map(os.environ.get, names)), None) for field, names in self.variables.items()}
        return {field: value for field, value in set.items() if value}

    def _given_configuration(self, settings: StoreSettings) -> dict[str, object]:
        """The fields of a job's settings. obstore would add the variables of this process, which may be those of another job."""
        config: dict[str, object] = dict(settings.credentials)
        for field, value in self._from_environment().items():
            if config.get(field) != value:
                what = f"this process was made by a job with another {' or '.join(self.variables[field])}"
                remedy = "use one configuration for all jobs of the cluster, or end the other jobs and `ray.kill` their actors"
                raise StoreError(what, subject=self.uri, remedy=remedy)
        return config

    @renewing
    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        subject = self._subject(key)
        with self._request("GET", subject):
            return self._attempts().result_of(lambda: self._whole(self._below + key, max_bytes, subject))

    def _whole(self, path: str, max_bytes: int, subject: str) -> Tagged:
        answer, data = obstore.get(self._clients.fetch, path), bytearray()
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

    def _swap(self, path: str, data: bytes, tag: str | None, subject: str) -> str:
        mode: PutMode = "create" if tag is None else self._with_tag(tag)
        with self._request(CONDITIONAL_PUT, subject):
            result = obstore.put(self._clients.swap, path, data, mode=mode, use_multipart=False)
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

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        subject = f"{self.uri}/{checks.checked_prefix(prefix)}"
        # obstore lists folders: what follows the last slash is compared in ``_listed``.
        folder = (self._below + prefix).rpartition("/")[0]
        pages = each(self._pages(folder), lambda: self._request("LIST", subject))
        yield from self._listed(((e["path"], e["size"], e["last_modified"]) for page in pages for e in page), prefix)

    def _pages(self, folder: str) -> Iterator[Sequence[ObjectMeta]]:
        """What a folder contains. After a failure the listing goes on behind the last entry."""
        last, attempts = None, self._attempts()
        while True:
            try:
                for page in obstore.list(self._clients.fetch, folder or None, offset=last):
                    yield page
                    last, attempts = page[-1]["path"] if page else last, self._attempts()
                return
            except FAILURES as error:
                attempts.after(error)

    @renewing
    def _delete(self, paths: Sequence[str]) -> None:
        try:
            with self._request("DELETE", self.uri):
                self._remove(paths)
        except NotFound:  # of one: obstore does not report the others
            for path in paths:
                subject = f"{self.scheme}://{self._bucket}/{path}"
                with contextlib.suppress(NotFound), self._request("DELETE", subject):
                    self._remove([path])

    def _remove(self, paths: Sequence[str]) -> None:
        self._attempts().result_of(lambda: obstore.delete(self._clients.fetch, paths))

    def unfinished(self) -> Iterator[Unfinished]:
        """Nothing: obstore does not list uploads in parts. They are never visible as objects."""
        return iter(())

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Do nothing, since ``unfinished`` lists nothing."""

    def _connect(self, settings: StoreSettings | None) -> BucketClients:
        limits = self._limits
        try:
            config = self._configuration() if settings is None else self._given_configuration(settings)
            http = {"allow_http": str(config.get(self.endpoint_field, "")).startswith("http://")}
            make = functools.partial(self.client, self._bucket, config=config)
            sending = {**limits.upload_timeouts, **http}
            fetch = make(client_options={**limits.read_timeouts, **http}, retry_config=ONCE)
            return BucketClients(
                send=make(client_options=sending, retry_config=ONCE),
                send_parts=make(client_options=sending, retry_config=limits.retries),
                fetch=fetch,
                swap=fetch,
                endpoint=str(config.get(self.endpoint_field, "")),
            )
        except (BaseError, OSError, ValueError) as error:  # their texts may hold parts of credentials
            what = f"the configuration does not make a client: {type(error).__name__}"
            raise StoreError(what, subject=self.uri, remedy=self.answers.credentials) from None
