"""Translates what a store's server or obstore reports into raystow's errors.

Messages are made from HTTP status, error code and operation only. Servers echo whole requests in their answers (signatures,
session tokens), so no text of theirs is passed on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from obstore.exceptions import BaseError

from ..errors import CredentialsRefused, Damaged, NotFound, PreconditionFailed, StoreError, StoreFull, StoreUnavailable
from .checks import FREES_SPACE

CONDITIONAL_PUT = "conditional PUT"
GET_OF_RANGE = "GET of a range"
ANOTHER = "this store lacks an operation that raystow needs: use another"
"""A remedy."""

_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})\b")
_FINAL = 501, 505, 507
"""Errors of a server that a repetition does not change: an unknown operation or version of HTTP, and a full disk."""
_FULL = "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"
_LATER = 408, 429
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(?=[/?)\s\"']|$)")
_PASSING_CODES = "InternalError", "SlowDown"  # some servers report them with status 200
_SILENT = "Timeout", "Connect"
_BROKEN = re.compile(r"\bkind: (Timeout|Connect|Request|Interrupted|Decode)\b")
# Azurite's answer for a range that starts at the end; Azure's is 416.
_AT_END = re.compile(r'CONTENT_RANGE header: "bytes 0--1/0"|, but object was only \d+ bytes long')


@dataclass(frozen=True)
class StoreAnswers:
    """The meaning of one provider's answers.

    Attributes:
        name: The provider, as messages name it.
        refused: Error codes that a repetition does not change, with their remedies.
        refused_status: The same for HTTP statuses whose code is unknown.
        lost_races: Codes of a conditional write that came too late, or met another one.
        spoilt: Codes after which the whole write is worth another try: the request arrived changed, or it was the second of its
            kind, since the answer to the first was lost.
        credentials: The remedy for missing or wrong credentials.
        later: The remedy for a server that does not answer.
        expired: Codes for credentials that are unknown or not valid any more.
        token_request: What an error about the request for credentials contains.
    """

    name: str
    refused: Mapping[str, str]
    refused_status: Mapping[int, str]
    lost_races: tuple[str, ...]
    spoilt: tuple[str, ...]
    credentials: str
    later: str
    expired: tuple[str, ...] = ()
    token_request: str | None = None

    def error(self, status: int, code: str, *, operation: str, subject: str) -> StoreError | NotFound | Damaged:
        """The error for an HTTP ``status`` and error ``code`` that answered ``operation`` on ``subject``."""
        what = f"{self.name} answered {operation} with {status or 'no status'} {code}".rstrip()
        if status == 507 or code in _FULL:
            return StoreFull(what, subject=subject, remedy=f"raise the quota, add disks, or free space: {FREES_SPACE}")
        if code in self.expired or status == 401:
            return CredentialsRefused(what, subject=subject, remedy=self.refused.get(code, self.credentials))
        if code in self.refused:
            return StoreError(what, subject=subject, remedy=self.refused[code])
        if operation == CONDITIONAL_PUT and (status == 412 or code in self.lost_races):
            return PreconditionFailed(what, subject=subject, remedy="read it again")
        if status == 416 or code == "InvalidRange":
            return Damaged(
                f"the object ends before this range: {what}", subject=subject, remedy="it was cut: use another version"
            )
        if code == "NoSuchUpload":
            # A retry of a completion whose first answer was lost: whether the object is there is open.
            return StoreUnavailable(what, subject=subject, remedy="try again")
        if status == 404 or code in ("NoSuchKey", "NotFound"):
            return NotFound("there is no such object", subject=subject)
        if status in self.refused_status:
            return StoreError(what, subject=subject, remedy=self.refused_status[status])
        return StoreUnavailable(what, subject=subject, remedy="try again later")

    def is_passing(self, error: BaseException) -> bool:
        """Whether a repetition may succeed after this failure of obstore."""
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        if code is not None and code[1] in self.refused:
            return False
        if status is not None:
            return (number := int(status[1])) in _LATER or (number >= 500 and number not in _FINAL)
        return _BROKEN.search(text) is not None or (code is not None and code[1] in _PASSING_CODES)

    def is_silence(self, error: BaseException) -> bool:
        """Whether the server did not answer at all."""
        text = str(error)
        broken = _BROKEN.search(text)
        return broken is not None and broken[1] in _SILENT and _STATUS.search(text) is None

    def is_spoilt(self, error: BaseError | OSError) -> bool:
        """Whether the whole operation is worth another try after this failure of obstore."""
        code = _CODE.search(str(error))
        return code is not None and code[1] in self.spoilt

    @contextlib.contextmanager
    def obstore_errors(self, operation: str, subject: str) -> Iterator[None]:
        """Turn what obstore raises into raystow's errors. Its ``NotFoundError`` arrives as the built-in ``FileNotFoundError``."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._from_obstore(error, operation, subject) from None

    def _from_obstore(self, error: BaseError | OSError, operation: str, subject: str) -> StoreError | NotFound | Damaged:
        text = str(error)
        if _AT_END.search(text):
            return self.error(416, "", operation=operation, subject=subject)
        status, code, broken = _STATUS.search(text), _CODE.search(text), _BROKEN.search(text)
        if self.token_request and self.token_request in text:
            what = f"{operation} could not be sent: the request for credentials failed{f' with {status[1]}' if status else ''}"
            refused = status is not None and status[1].startswith("4")
            return (CredentialsRefused if refused else StoreUnavailable)(what, subject=subject, remedy=self.credentials)
        if status or code:
            return self.error(int(status[1]) if status else 0, code[1] if code else "", operation=operation, subject=subject)
        name = type(error).__name__
        if name == "FileNotFoundError":
            return NotFound("there is no such object", subject=subject)
        if name in ("PermissionDeniedError", "UnauthenticatedError"):
            kind = CredentialsRefused if name == "UnauthenticatedError" else StoreError
            return kind(f"{operation} was refused: {name}", subject=subject, remedy=self.credentials)
        what = f"{operation} failed: {broken[1].lower() + ' error' if broken else name}{silent_endpoint(text)}"
        return StoreUnavailable(what, subject=subject, remedy=self.later)


def silent_endpoint(text: str) -> str:
    """The server that an error is about, without credentials, path and query; "" if the error does not tell."""
    found = _URL.search(text)
    return f" ({found[0]} does not answer)" if found else ""
