"""A bucket of an S3-compatible server as an object store.

boto3 sends small requests (the compare-and-swap, small reads, listings, deletions), obstore large ones (packs and ranges of
them).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import obstore
from botocore.exceptions import ClientError

from ..errors import StoreUnavailable
from ..object_store import Buffer, ObjectInfo, Tagged, Unfinished
from ..runtime.metrics import RETRIES, record
from . import bounded_http, checks, endless_answers
from .awaited import each
from .bucket import Bucket, renewing
from .request_limits import RequestLimits
from .s3_clients import S3Clients, S3Configuration, connect
from .s3_errors import ANSWERS, boto_errors
from .settings import JobSettings, S3Overrides, StoreSettings
from .store_answers import CONDITIONAL_PUT, GET_OF_RANGE

_NO_BATCHES = "NotImplemented", "MethodNotAllowed"  # error codes of servers without DeleteObjects


class S3Store(Bucket[S3Clients]):
    """Objects under ``prefix`` of ``bucket``, reached as the AWS configuration says.

    Every body that is put carries a CRC64NVME, and over plain http a SHA-256 in the signature, which the server checks before it
    answers. The standard setting ``AWS_REQUEST_CHECKSUM_CALCULATION=when_required`` leaves both away. obstore aborts an upload in
    parts on failure; what a killed process leaves, ``unfinished`` finds.
    """

    scheme, answers, most_deleted = "s3", ANSWERS, 1000

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        limits: RequestLimits | None = None,
        given: JobSettings | None = None,
        overrides: S3Overrides = S3Overrides(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(bucket, prefix, limits=limits, given=given)
        self._overrides = overrides

    @renewing
    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        """As the protocol says; the tag is the ETag."""
        subject = self._subject(key)
        for left in reversed(range(min(self._limits.attempts, self._limits.silent_attempts))):
            with self._boto_request("GET", subject), bounded_http.at_most(max_bytes):
                answer = self._clients.decide.get_object(Bucket=self._bucket, Key=self._below + key)
                size, tag = int(answer["ContentLength"]), str(answer["ETag"])
            # Not ``with body``: that would hand out the raw stream, without botocore's check of length and checksum.
            with contextlib.closing(answer["Body"]) as body:
                if size > max_bytes:
                    raise checks.too_large(subject, size, max_bytes)
                try:
                    with self._boto_request("GET", subject):
                        return Tagged(body.read(), tag)
                except StoreUnavailable:  # boto3 tries again by itself only as long as there is no body
                    if not left:
                        raise
                    record(RETRIES, repository=self.uri)
        raise AssertionError("unreachable")

    def _pieces(self, path: str, start: int, length: int) -> Iterator[Buffer]:
        client, limits = self._clients.fetch, self._limits
        try:
            answer = endless_answers.result_of(
                lambda: obstore.get_async(client, path, options={"range": (start, start + length)}),
                patience=limits.suspect_seconds,
                growth=limits.suspect_bytes,
            )
        except endless_answers.EndlessAnswer:
            return iter([self._bounded_body(path, start, length)])
        return self._stream(answer, length)

    def _bounded_body(self, path: str, start: int, length: int) -> bytes:
        with self._boto_request(GET_OF_RANGE, f"s3://{self._bucket}/{path}"), bounded_http.at_most(length):
            area = f"bytes={start}-{start + length - 1}"
            answer = self._clients.decide.get_object(Bucket=self._bucket, Key=path, Range=area)
            with contextlib.closing(answer["Body"]) as body:
                data: bytes = body.read()
                return data

    def _swap(self, path: str, data: bytes, tag: str | None, subject: str) -> str:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._boto_request(CONDITIONAL_PUT, subject):
            return str(self._clients.swap.put_object(Bucket=self._bucket, Key=path, Body=data, **condition)["ETag"])

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        subject = f"{self.uri}/{checks.checked_prefix(prefix)}"
        found = self._clients.decide.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._below + prefix)
        pages = ([(e["Key"], e["Size"], e["LastModified"]) for e in page.get("Contents", ())] for page in found)
        received = each(pages, lambda: self._boto_request("LIST", subject))
        yield from self._listed(chain.from_iterable(received), prefix)

    @renewing
    def _delete(self, paths: Sequence[str]) -> None:
        with self._boto_request("DELETE", self.uri):
            failures = self._failures([{"Key": path} for path in paths])
        for failure in failures:
            code, subject = failure.get("Code", ""), f"s3://{self._bucket}/{failure.get('Key', '')}"
            if code not in ("NoSuchKey", "NoSuchVersion"):
                raise ANSWERS.error(0, code, operation="DELETE", subject=subject)

    def _failures(self, batch: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        """Delete objects at once, or one by one from a server that cannot do that. Returns what was not deleted."""
        client = self._clients.decide
        try:
            answer = client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _NO_BATCHES:
                raise
            for names in batch:
                client.delete_object(Bucket=self._bucket, **names)
            return ()
        failures: Sequence[Mapping[str, str]] = answer.get("Errors", ())
        return failures

    @renewing
    def keeps_deleted(self) -> bool:
        """Whether the bucket is versioned: then what is deleted still takes space. Raises ``StoreError`` if it is not known."""
        with self._boto_request("the question for versioning (s3:GetBucketVersioning)", self.uri):
            answer = self._clients.decide.get_bucket_versioning(Bucket=self._bucket)
            return bool(answer.get("Status") == "Enabled")

    def unfinished(self) -> Iterator[Unfinished]:
        """As the protocol says: multipart uploads; the token is the upload's id.

        Starts are in whole seconds, like the times of objects: else what was just begun would be later than the store's clock.
        """
        return iter(self._uploads())

    @renewing
    def _uploads(self) -> Sequence[Unfinished]:
        found = self._clients.decide.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._below)
        pages = ([(e["Key"], e["UploadId"], e["Initiated"].timestamp()) for e in page.get("Uploads", ())] for page in found)
        received = chain.from_iterable(each(pages, lambda: self._boto_request("LIST of multipart uploads", self.uri)))
        uploads = ((path[len(self._below) :], token, started) for path, token, started in received)
        return [Unfinished(key, token, int(started)) for key, token, started in uploads if checks.is_key(key)]

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """As the protocol says. A part that is on its way at this moment may still arrive: then the upload is listed again."""
        for write in unfinished:
            self._abort(write)

    @renewing
    def _abort(self, write: Unfinished) -> None:
        subject, client = self._subject(write.key), self._clients.decide
        ended = contextlib.suppress(client.exceptions.NoSuchUpload)
        with self._boto_request("the end of a multipart upload", subject), ended:
            client.abort_multipart_upload(Bucket=self._bucket, Key=self._below + write.key, UploadId=write.token)

    @contextlib.contextmanager
    def _boto_request(self, operation: str, subject: str) -> Iterator[None]:
        """Wait for boto3 within the block: its errors become raystow's."""
        with boto_errors(operation, subject), self._awaiting(operation, subject):
            yield

    def _sent(self) -> dict[str, Any]:
        if self._overrides.credentials:
            raise self._not_sent()
        return {**super()._sent(), "overrides": self._overrides}

    @functools.cached_property
    def _configuration(self) -> S3Configuration:
        return S3Configuration(self._bucket, overrides=self._overrides)

    def _configured(self, anew: bool) -> StoreSettings:
        if self._configuration.outdated(anew):
            with self._lock:
                self.__dict__.pop("_configuration", None)
                self._made = None
        return self._configuration.settings()

    def _connect(self, settings: StoreSettings | None) -> S3Clients:
        configuration = self._configuration if settings is None else S3Configuration(self._bucket, settings=settings)
        clients = connect(configuration, self._limits)
        clients.decide.meta.events.register("request-created.s3", self._count_retry)
        return clients

    def _count_retry(self, request: Any, **_: object) -> None:
        """botocore is about to send a request: once more, if that was tried before."""
        if request.context["retries"]["attempt"] > 1:
            record(RETRIES, repository=self.uri)
