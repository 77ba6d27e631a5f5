"""The objects of one bucket or container: addresses, what all servers answer alike, and packs and ranges through obstore.

obstore takes buffers without a copy and works without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast

import obstore

from ..errors import CredentialsRefused, NotFound, StateError, StoreError
from ..object_store import Buffer, ObjectInfo, Tagged
from ..runtime.gc_pause import uncollected
from ..runtime.metrics import RETRIES, record
from . import checks
from .attempts import FAILURES, Attempts
from .awaited import Awaited, awaiting, each
from .forks import mark_used
from .request_limits import RequestLimits, of_process
from .settings import JobSettings, StoreSettings
from .store_answers import GET_OF_RANGE, StoreAnswers
from .upload_content import UploadContent

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore as ObstoreClient

_MIB = 1 << 20
_PIECE = 256 << 10
_MOST_PARTS = 10_000


@dataclass(frozen=True)
class BucketClients:
    """``send`` is for uploads, ``fetch`` for reads, ``swap`` for conditional writes, all without any retry. ``send_parts``
    repeats single parts of an upload. ``endpoint``: the server's URL; "" for the provider's own."""

    endpoint: str
    send: ObstoreClient
    send_parts: ObstoreClient
    fetch: ObstoreClient
    swap: Any


_Clients = TypeVar("_Clients", bound=BucketClients)
_Store = TypeVar("_Store", bound="Bucket[Any]")
_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")


def renewing(
    request: Callable[Concatenate[_Store, _Parameters], _Result],
) -> Callable[Concatenate[_Store, _Parameters], _Result]:
    """Let a method send its request once more if the credentials were refused and there are others. A refused request had no
    effect, so this is safe for each of them."""

    @functools.wraps(request)
    def send(self: _Store, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        used = self._used
        try:
            return request(self, *args, **kwargs)
        except CredentialsRefused:
            if not self._renewed(used):
                raise
        return request(self, *args, **kwargs)

    return send


class Bucket(ABC, Generic[_Clients]):
    """Objects under ``prefix`` of ``bucket``.

    The clients are made at the first call, in the calling process. Pickling carries the address and the limits only.

    Args:
        given: The settings; None for those of this process's environment. Clients are made anew when they change.
    """

    scheme: ClassVar[str]
    answers: ClassVar[StoreAnswers]
    most_deleted: ClassVar[int]
    """Objects that one request deletes."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        limits: RequestLimits | None = None,
        given: JobSettings | None = None,
    ) -> None:
        self._bucket, self._prefix, self._limits, self._given = bucket, prefix, limits or of_process(), given
        self._below = f"{prefix}/" if prefix else ""
        self._place = ""
        self._made: _Clients | None = None
        self._made_with: StoreSettings | None = None
        self._lock, self._renewing = threading.Lock(), threading.Lock()

    @property
    def uri(self) -> str:
        """``scheme://bucket/prefix``."""
        return f"{self.scheme}://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def _clients(self) -> _Clients:
        mark_used(self.uri)
        settings = self._given() if self._given is not None else None
        with self._lock:
            if self._made is None or settings is not self._made_with:
                with uncollected():
                    self._made, self._made_with = self._connect(settings), settings
            return self._made

    def place(self) -> str:
        """See ``settings.Configured``."""
        if not self._place:
            self._place = self.settings().place
        return self._place

    def settings(self, *, anew: bool = False) -> StoreSettings:
        """See ``settings.Configured``."""
        return self._given() if self._given is not None else self._configured(anew)

    @abstractmethod
    def _configured(self, anew: bool) -> StoreSettings:
        """The settings of this process's environment, see ``settings.Configured``. Clients with older ones are dropped."""

    @property
    def _used(self) -> _Clients | StoreSettings | None:
        """What a request that begins now is sent with: the settings of a job, or else the clients; None if they are not made."""
        return self._given() if self._given is not None else self._made

    def _renewed(self, used: _Clients | StoreSettings | None) -> bool:
        """Whether there are other credentials now than those of ``used``, with which a request was refused."""
        if self._given is not None:
            return isinstance(used, StoreSettings) and self._given.renewed(used)
        with self._renewing:
            made = self._made
            if used is not None and used is not made:
                return True  # another thread was refused before
            self._configured(anew=True)
            return self._made is not made

    @abstractmethod
    def _connect(self, settings: StoreSettings | None) -> _Clients:
        """Make the clients, by default as this process's environment says. Raises ``StoreError`` without credentials."""

    @abstractmethod
    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged: ...

    @abstractmethod
    def _swap(self, path: str, data: bytes, tag: str | None, subject: str) -> str:
        """Send the request of ``put_if``. Raises ``NotFound`` if the object that carried the tag is gone."""

    @renewing
    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """See ``ObjectStore``. The request is sent once: after a lost answer, a second one would find the tag changed."""
        subject = self._subject(key)
        try:
            return self._swap(self._below + key, data, tag, subject)
        except NotFound:
            raise checks.stale(subject) from None

    def _listed(self, found: Iterable[tuple[str, int, datetime]], prefix: str) -> Iterator[ObjectInfo]:
        """What was listed, by path, size and time of change, without the objects of others (the "folders" of web
        consoles): they are neither read nor deleted."""
        last = ""
        for path, size, modified in found:
            if path <= last:  # it would also let a listing go on for ever
                subject = f"{self.uri}/{prefix}"
                raise StoreError("LIST does not give keys in their order", subject=subject, remedy="use another store")
            last, key = path, path[len(self._below) :]
            if key.startswith(prefix) and checks.is_key(key):
                yield ObjectInfo(key, size, modified.timestamp())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the protocol says. After a refusal it begins again, without what is known."""
        last, used = "", self._used
        try:
            for found in self._list(prefix):
                yield found
                last = found.key
            return
        except CredentialsRefused:
            if not self._renewed(used):
                raise
        yield from (found for found in self._list(prefix) if found.key > last)

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[ObjectInfo]: ...

    def delete(self, keys: Iterable[str]) -> None:
        """As the protocol says."""
        remaining = iter(keys)
        while batch := [self._below + checks.checked_key(key) for key in islice(remaining, self.most_deleted)]:
            self._delete(batch)

    @abstractmethod
    def _delete(self, paths: Sequence[str]) -> None: ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.get_tagged(key, max_bytes=max_bytes).data

    @renewing
    def get_range(self, key: str, start: int, length: int) -> Buffer:
        data = bytearray()
        for piece in self._body(key, start, length):
            data += piece
        return data

    @renewing
    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """As the protocol says; each piece of the body is copied as it arrives, so that nothing takes memory for the whole."""
        filled = 0
        for piece in self._body(key, start, target.nbytes):
            target[filled : filled + len(piece)] = piece
            filled += len(piece)

    def _body(self, key: str, start: int, length: int) -> Iterator[Buffer]:
        """Exactly the bytes of a range, in pieces. What a server sends beyond them is an error, and is not read."""
        subject, left = self._subject(key), length
        checks.checked_range(subject, start, length)
        if length == 0:
            # HTTP has no empty range.
            with self._request("HEAD", subject):
                head = self._attempts().result_of(lambda: obstore.head(self._clients.fetch, self._below + key))
                left = max(0, start - head["size"])
        else:
            pieces = self._received(self._below + key, start, length)
            for piece in each(pieces, lambda: self._request(GET_OF_RANGE, subject)):
                left -= len(piece)
                if left < 0:
                    raise checks.too_large(subject, f"at least {length - left}", length)
                yield piece
                if not left:
                    break
        if left:
            raise checks.ends_early(subject, start, length)

    def _received(self, path: str, start: int, length: int) -> Iterator[Buffer]:
        """The bytes of a range, in pieces. After a failure only those are requested that did not arrive."""
        attempts, end = self._attempts(), start + length
        while True:
            try:
                for piece in self._pieces(path, start, end - start):
                    start += len(piece)
                    yield piece
                return
            except FAILURES as error:
                attempts.after(error)

    @contextlib.contextmanager
    def _request(self, operation: str, subject: str, seconds: float | None = None) -> Iterator[None]:
        """Wait for obstore within the block: its errors become raystow's."""
        with self.answers.obstore_errors(operation, subject), self._awaiting(operation, subject, seconds):
            yield

    def _awaiting(self, operation: str, subject: str, seconds: float | None = None) -> AbstractContextManager[None]:
        longest = self._limits.unanswered_seconds if seconds is None else seconds
        return awaiting(Awaited(operation, subject, self._clients.endpoint, longest))

    def _attempts(self) -> Attempts:
        return Attempts(self.answers, self._limits, self.uri)

    def _pieces(self, path: str, start: int, length: int) -> Iterator[Buffer]:
        """The body of the answer to a request for a range."""
        return self._stream(obstore.get(self._clients.fetch, path, options={"range": (start, start + length)}), length)

    @staticmethod
    def _stream(answer: GetResult, length: int) -> Iterator[Buffer]:
        # obstore's pieces of a fast answer have some 300 KiB; smaller ones are joined, since each costs a call.
        return iter(answer.stream(min_chunk_size=min(length, _PIECE)))

    @renewing
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says. The server makes the object visible only when it is whole: by the answer to one PUT, or to the
        completion of an upload in parts."""
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        with self._request("PUT", self._subject(key), self._limits.unanswered_upload_seconds):
            try:
                self._send(self._below + key, views)
            except FAILURES as error:
                if not self.answers.is_spoilt(error):
                    raise
                record(RETRIES, repository=self.uri)
                self._send(self._below + key, views)  # safe: whatever the first one has come to, this replaces it by the same

    def _send(self, path: str, views: Sequence[memoryview]) -> None:
        attempts, total = self._attempts(), sum(view.nbytes for view in views)
        if total <= self._limits.single_put_bytes:
            whole = views[0] if len(views) == 1 else b"".join(views)
            attempts.result_of(lambda: obstore.put(self._clients.send, path, whole, use_multipart=False))
            return
        size = self._part_size(total)
        most, client = self._limits.concurrency, self._clients.send
        while True:
            try:
                obstore.put(client, path, views, use_multipart=True, chunk_size=size, max_concurrency=most)
                return
            except FAILURES as error:
                attempts.after(error)
                if not self.answers.is_silence(error):
                    client = self._clients.send_parts

    @renewing
    def put_stream(self, key: str, content: Callable[[], Iterable[Buffer]], nbytes: int) -> None:
        """See ``StreamedStore``. Memory: some parts of the upload, together ``RequestLimits.stream_bytes``."""
        if nbytes <= self._limits.single_put_bytes:
            whole = bytearray()
            for part in content():
                whole += memoryview(part).cast("B")
            self.put(key, [whole])
            return
        subject, source, size = self._subject(key), UploadContent(content()), self._part_size(nbytes)
        most = max(1, self._limits.stream_bytes // size)
        with self.answers.obstore_errors("PUT", subject):
            try:  # obstore repeats failed parts, and aborts the upload if that or the content fails
                file, client = cast("IO[bytes]", source), self._clients.send_parts
                obstore.put(client, self._below + key, file, use_multipart=True, chunk_size=size, max_concurrency=most)
            except FAILURES:
                if source.failure is None:
                    raise
        if source.failure is not None:
            raise source.failure

    def _part_size(self, total: int) -> int:
        return max(self._limits.part_bytes, -(-total // _MOST_PARTS // _MIB) * _MIB)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), self._bucket, self._prefix, **self._sent()), ()

    def _sent(self) -> dict[str, Any]:
        """The options that another process makes this store with. Raises ``StateError`` if there are credentials among them."""
        if self._given is not None:
            raise self._not_sent()
        return {"limits": self._limits}

    def _not_sent(self) -> StateError:
        what, remedy = "a store with given credentials is not sent to another process", "open the repository there"
        return StateError(what, subject=self.uri, remedy=remedy)

    def _subject(self, key: str) -> str:
        return f"{self.uri}/{checks.checked_key(key)}"
