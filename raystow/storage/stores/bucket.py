"""The objects of one bucket or container: addresses, and packs and ranges of them through obstore.

obstore takes buffers without a copy and works without the interpreter's lock.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import obstore
from obstore.exceptions import BaseError

from ..metrics import RETRIES, record
from ..object_store import Buffer, Tagged
from . import checks
from .request_limits import DEFAULT_LIMITS, RequestLimits
from .store_answers import GET_OF_RANGE, StoreAnswers

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore as ObstoreClient

_MIB = 1 << 20
_MOST_PARTS = 10_000


class BucketClients(Protocol):
    """``send`` is for uploads, ``fetch`` for reads."""

    @property
    def send(self) -> ObstoreClient: ...
    @property
    def fetch(self) -> ObstoreClient: ...


class Bucket(ABC):
    """Objects under ``prefix`` of ``bucket``.

    The clients are made at the first call, in the calling process. Pickling carries the address and the limits only.
    """

    scheme: ClassVar[str]
    answers: ClassVar[StoreAnswers]

    def __init__(self, bucket: str, prefix: str = "", *, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self._bucket, self._prefix, self._limits = bucket, prefix, limits
        self._below = f"{prefix}/" if prefix else ""

    @property
    def uri(self) -> str:
        """``scheme://bucket/prefix``."""
        return f"{self.scheme}://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    @abstractmethod
    def _clients(self) -> BucketClients: ...

    @abstractmethod
    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged: ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.get_tagged(key, max_bytes=max_bytes).data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """As the protocol says; the memory belongs to obstore and is not copied."""
        subject = self._subject(key)
        checks.checked_range(subject, start, length)
        if length == 0:
            # HTTP has no empty range.
            with self.answers.obstore_errors("HEAD", subject):
                size = obstore.head(self._clients.fetch, self._below + key)["size"]
            data = memoryview(b"")
        else:
            with self.answers.obstore_errors(GET_OF_RANGE, subject):
                data = self._fetch(self._below + key, start, length)
            size = start + data.nbytes
            if data.nbytes > length:
                raise checks.too_large(subject, f"at least {data.nbytes}", length)
        if size < start + length:
            raise checks.ends_early(subject, start, length)
        return data

    def _fetch(self, path: str, start: int, length: int) -> memoryview:
        """The bytes of a range, or a few more if the server goes on: the rest is not read."""
        return self._first(obstore.get(self._clients.fetch, path, options={"range": (start, start + length)}), length)

    @staticmethod
    def _first(answer: GetResult, length: int) -> memoryview:
        return memoryview(next(iter(answer.stream(min_chunk_size=length)), b""))

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = self.get_range(key, start, target.nbytes)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says. The server makes the object visible only when it is whole: by the answer to one PUT, or to the
        completion of an upload in parts."""
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        with self.answers.obstore_errors("PUT", self._subject(key)):
            try:
                self._send(self._below + key, views)
            except (BaseError, OSError) as error:
                if not self.answers.is_spoilt(error):
                    raise
                record(RETRIES, repository=self.uri)
                self._send(self._below + key, views)  # safe: whatever the first one has come to, this replaces it by the same

    def _send(self, path: str, views: list[memoryview]) -> None:
        total = sum(view.nbytes for view in views)
        if total <= self._limits.single_put_bytes:
            whole = views[0] if len(views) == 1 else b"".join(views)
            obstore.put(self._clients.send, path, whole, use_multipart=False)
            return
        obstore.put(
            self._clients.send,
            path,
            views,
            use_multipart=True,
            chunk_size=max(self._limits.part_bytes, -(-total // _MOST_PARTS // _MIB) * _MIB),
            max_concurrency=self._limits.concurrency,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), self._bucket, self._prefix, limits=self._limits), ()

    def _subject(self, key: str) -> str:
        return f"{self.uri}/{checks.checked_key(key)}"
