"""Translates failures of an S3 server or client into raystow's errors.

Messages are made from HTTP status, error code and operation only. Servers echo whole requests in their answers (signatures,
session tokens), so no text of theirs is passed on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
)
from obstore.exceptions import BaseError
from urllib3.exceptions import HTTPError

from ..errors import Damaged, NotFound, PreconditionFailed, StoreError, StoreUnavailable

CONDITIONAL_PUT = "conditional PUT"

# Two writers met: the condition was false (412), or could not be judged while the other was at work (409; AWS, then Ceph).
_LOST_RACES = ("PreconditionFailed", "ConditionalRequestConflict", "ConcurrentModification")
_RIGHTS = (
    "this needs s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListBucket and, to collect, "
    "ListBucketMultipartUploads on the bucket"
)
_KEYS = "check the AWS credentials: variables, profile or role"
_CONFIGURATION = "check the AWS configuration: variables, ~/.aws/config, ~/.aws/credentials"
_REGION = "set AWS_DEFAULT_REGION to the bucket's region"
_REFUSED = {
    "NoSuchBucket": "create the bucket, or correct the address",
    "InvalidBucketName": "correct the address",
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "ExpiredToken": _KEYS,
    "InvalidToken": _KEYS,
    "TokenRefreshRequired": _KEYS,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "raise the bucket's quota, or remove old versions",
    "EntityTooLarge": "this store limits the size of objects: raise its limit",
    "NotImplemented": "this store lacks an operation that raystow needs: use another",
    "MethodNotAllowed": "this store lacks an operation that raystow needs: use another",
}
_REFUSED_STATUS = {301: _REGION, 307: _REGION, 401: _KEYS, 403: _RIGHTS, 501: _REFUSED["NotImplemented"]}
_MISCONFIGURED = re.compile(
    r"(No|Partial|Unknown)Credential|Profile|Config|Token|SSO|Login|Refresh|ParamValidation|(No|Unknown|Invalid)(Region|Endpoint)"
)

# The request arrived changed; or it was the second of its kind, since the answer to the first was lost.
_SPOILT = (
    "BadDigest",
    "IncompleteBody",
    "MalformedXML",
    "NoSuchUpload",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)

_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(?=[/?)\s\"']|$)")
_LATER = "check the endpoint (AWS_ENDPOINT_URL) and the network, or try again later"
_BROKEN = re.compile(r"\bkind: (Timeout|Connect|Request|Interrupted|Decode)\b")


def from_answer(status: int, code: str, *, operation: str, subject: str) -> StoreError | Damaged:
    """The error for an HTTP ``status`` and S3 error ``code`` that answered ``operation`` on ``subject``."""
    what = f"S3 answered {operation} with {status or 'no status'} {code}".rstrip()
    if code in _REFUSED:
        return StoreError(what, subject=subject, remedy=_REFUSED[code])
    if operation == CONDITIONAL_PUT and (status == 412 or code in _LOST_RACES):
        return PreconditionFailed(what, subject=subject, remedy="read it again")
    if status == 416 or code == "InvalidRange":
        return Damaged(f"the object ends before this range: {what}", subject=subject, remedy="it was cut: use another version")
    if code == "NoSuchUpload":
        # A retry of a completion whose first answer was lost: whether the object is there is open.
        return StoreUnavailable(what, subject=subject, remedy="try again")
    if status == 404 or code in ("NoSuchKey", "NotFound"):
        return NotFound("there is no such object", subject=subject)
    if status in _REFUSED_STATUS:
        return StoreError(what, subject=subject, remedy=_REFUSED_STATUS[status])
    return StoreUnavailable(what, subject=subject, remedy="try again later")


@contextlib.contextmanager
def boto_errors(operation: str, subject: str) -> Iterator[None]:
    """Turn what boto3 raises into raystow's errors."""
    try:
        yield
    except ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code", ""))
        # Some servers give the status in the place of the code.
        raise from_answer(status, "" if code.isdigit() else code, operation=operation, subject=subject) from None
    except FlexibleChecksumError:
        what = f"the bytes that arrived for {operation} do not have the checksum that came with them"
        raise StoreUnavailable(what, subject=subject, remedy="try again: it happened on the way") from None
    except (BotoCoreError, HTTPError, OSError) as error:
        name = type(error).__name__
        if _MISCONFIGURED.search(name):
            raise StoreError(f"{operation} could not be sent: {name}", subject=subject, remedy=_CONFIGURATION) from None
        remedy = "set AWS_CA_BUNDLE if its certificate is your own" if "SSL" in name else _LATER
        raise StoreUnavailable(f"{operation} failed: {name}{_endpoint(str(error))}", subject=subject, remedy=remedy) from None
    # The answer is not one of S3; and botocore follows redirects without a limit.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        missing = f": there is no {error} in the answer" if isinstance(error, KeyError) else ""
        what = f"{operation} failed: {type(error).__name__}{missing}"
        raise StoreUnavailable(what, subject=subject, remedy=_LATER) from None


def spoilt(error: BaseError | OSError) -> bool:
    """Whether the whole operation is worth another try after this failure of obstore."""
    code = _CODE.search(str(error))
    return code is not None and code[1] in _SPOILT


@contextlib.contextmanager
def obstore_errors(operation: str, subject: str) -> Iterator[None]:
    """Turn what obstore raises into raystow's errors. Its ``NotFoundError`` arrives as the built-in ``FileNotFoundError``."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise _from_obstore(error, operation, subject) from None


def _from_obstore(error: BaseError | OSError, operation: str, subject: str) -> StoreError | Damaged:
    text = str(error)
    status, code, broken = _STATUS.search(text), _CODE.search(text), _BROKEN.search(text)
    if status or code:
        return from_answer(int(status[1]) if status else 0, code[1] if code else "", operation=operation, subject=subject)
    name = type(error).__name__
    if name == "FileNotFoundError":
        return NotFound("there is no such object", subject=subject)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreError(f"{operation} was refused: {name}", subject=subject, remedy=_KEYS)
    what = f"{operation} failed: {broken[1].lower() + ' error' if broken else name}{_endpoint(text)}"
    return StoreUnavailable(what, subject=subject, remedy=_LATER)


def _endpoint(text: str) -> str:
    """The server that an error is about, without credentials, path and query; "" if the error does not tell."""
    found = _URL.search(text)
    return f" ({found[0]} does not answer)" if found else ""
