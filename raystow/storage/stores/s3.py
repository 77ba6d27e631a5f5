"""A bucket of an S3-compatible server as an object store.

boto3 sends small requests (the compare-and-swap, small reads, listings, deletions), obstore large ones (packs and ranges of
them): it takes buffers without a copy and works without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import obstore
from obstore.exceptions import BaseError

from ..errors import NotFound, StoreError, StoreUnavailable
from ..metrics import RETRIES, record
from ..object_store import Buffer, ObjectInfo, Tagged, Unfinished
from . import bounded_http, checks
from .s3_clients import DEFAULT_LIMITS, S3Clients, S3Limits, connect, refuse_forked
from .s3_errors import CONDITIONAL_PUT, boto_errors, from_answer, obstore_errors, spoilt

_MIB = 1 << 20
_MOST_PARTS = 10_000
_DELETE_BATCH = 1000


class S3Store:
    """Objects under ``prefix`` of ``bucket``, reached as the AWS configuration says. The clients are made at the first call, in
    the calling process. Pickling carries the address and the limits only."""

    def __init__(self, bucket: str, prefix: str = "", *, limits: S3Limits = DEFAULT_LIMITS) -> None:
        self._bucket, self._prefix, self._limits = bucket, prefix, limits
        self._below = f"{prefix}/" if prefix else ""
        self._made: S3Clients | None = None
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.get_tagged(key, max_bytes=max_bytes).data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """As the protocol says; the memory belongs to obstore and is not copied."""
        subject = self._subject(key)
        checks.checked_range(subject, start, length)
        if length == 0:
            # HTTP has no empty range.
            with boto_errors("HEAD", subject):
                size = int(self._clients.decide.head_object(Bucket=self._bucket, Key=self._below + key)["ContentLength"])
            data = memoryview(b"")
        else:
            with obstore_errors("GET of a range", subject):
                data = self._fetch(self._below + key, start, length)
            size = start + data.nbytes
            if data.nbytes > length:
                raise checks.too_large(subject, f"at least {data.nbytes}", length)
        if size < start + length:
            raise checks.ends_early(subject, start, length)
        return data

    def _fetch(self, path: str, start: int, length: int) -> memoryview:
        """The bytes of a range, or a few more if the server goes on: the rest is not read."""
        answer = obstore.get(self._clients.fetch, path, options={"range": (start, start + length)})
        return memoryview(next(iter(answer.stream(min_chunk_size=length)), b""))

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = self.get_range(key, start, target.nbytes)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says. The server makes the object visible only when it is whole: by the answer to one PUT, or to the
        completion of a multipart upload, which obstore aborts on failure; what a killed process leaves, ``unfinished`` finds.

        Every body carries a CRC64NVME, and over plain http a SHA-256 in the signature, which the server checks before it
        answers. The standard setting ``AWS_REQUEST_CHECKSUM_CALCULATION=when_required`` leaves both away.
        """
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        with obstore_errors("PUT", self._subject(key)):
            try:
                self._send(self._below + key, views)
            except (BaseError, OSError) as error:
                if not spoilt(error):
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

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        """As the protocol says; the tag is the ETag."""
        subject = self._subject(key)
        for left in reversed(range(self._limits.attempts)):
            with boto_errors("GET", subject), bounded_http.at_most(max_bytes):
                answer = self._clients.decide.get_object(Bucket=self._bucket, Key=self._below + key)
                size, tag = int(answer["ContentLength"]), str(answer["ETag"])
            # Not ``with body``: that would hand out the raw stream, without botocore's check of length and checksum.
            with contextlib.closing(answer["Body"]) as body:
                if size > max_bytes:
                    raise checks.too_large(subject, size, max_bytes)
                try:
                    with boto_errors("GET", subject):
                        return Tagged(body.read(), tag)
                except StoreUnavailable:  # boto3 tries again by itself only as long as there is no body
                    if not left:
                        raise
                    record(RETRIES, repository=self.uri)
        raise AssertionError("unreachable")

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """As the protocol says. Sent once and never again: after a lost answer a repeated request would lose against itself."""
        subject = self._subject(key)
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            with boto_errors(CONDITIONAL_PUT, subject):
                answer = self._clients.swap.put_object(Bucket=self._bucket, Key=self._below + key, Body=data, **condition)
                return str(answer["ETag"])
        except NotFound:
            # The object that carried the tag is gone.
            raise checks.stale(subject) from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        subject = f"{self.uri}/{checks.checked_prefix(prefix)}"
        with boto_errors("LIST", subject):
            pages, last = self._clients.decide.get_paginator("list_objects_v2"), ""
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._below + prefix):
                for entry in page.get("Contents", ()):
                    if entry["Key"] <= last:  # it would also let a listing go on for ever
                        raise StoreError("LIST does not give keys in their order", subject=subject, remedy="use another store")
                    last = entry["Key"]
                    key = last[len(self._below) :]
                    # Objects of others (the "folders" of web consoles) are neither read nor deleted.
                    if checks.is_key(key):
                        yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp())

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := [{"Key": self._below + checks.checked_key(key)} for key in islice(remaining, _DELETE_BATCH)]:
            with boto_errors("DELETE", self.uri):
                answer = self._clients.decide.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
            for failure in answer.get("Errors", ()):
                code, subject = failure.get("Code", ""), f"s3://{self._bucket}/{failure.get('Key', '')}"
                if code not in ("NoSuchKey", "NoSuchVersion"):
                    raise from_answer(0, code, operation="DELETE", subject=subject)

    def unfinished(self) -> Iterator[Unfinished]:
        """As the protocol says: multipart uploads, page by page; the token is the upload's id."""
        with boto_errors("LIST of multipart uploads", self.uri):
            pages = self._clients.decide.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._below):
                for entry in page.get("Uploads", ()):
                    key = entry["Key"][len(self._below) :]
                    if checks.is_key(key):
                        yield Unfinished(key, entry["UploadId"], entry["Initiated"].timestamp())

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """As the protocol says. A part that is on its way at this moment may still arrive: then the upload is listed again."""
        for write in unfinished:
            subject, client = self._subject(write.key), self._clients.decide
            with boto_errors("the end of a multipart upload", subject), contextlib.suppress(client.exceptions.NoSuchUpload):
                client.abort_multipart_upload(Bucket=self._bucket, Key=self._below + write.key, UploadId=write.token)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(S3Store, self._bucket, self._prefix, limits=self._limits), ()

    @property
    def _clients(self) -> S3Clients:
        refuse_forked(self.uri)
        with self._lock:
            if self._made is None:
                self._made = connect(self._bucket, self._limits)
                self._made.decide.meta.events.register("request-created.s3", self._count_retry)
            return self._made

    def _count_retry(self, request: Any, **_: object) -> None:
        """botocore is about to send a request: once more, if that was tried before."""
        if request.context["retries"]["attempt"] > 1:
            record(RETRIES, repository=self.uri)

    def _subject(self, key: str) -> str:
        return f"{self.uri}/{checks.checked_key(key)}"
