"""The meaning of an S3 server's answers, and boto3's failures as raystow's errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError
from urllib3.exceptions import HTTPError

from ..errors import CredentialsRefused, StoreError, StoreUnavailable
from .store_answers import ANOTHER, StoreAnswers, silent_endpoint

_RIGHTS = (
    "this needs s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListBucket and, to collect, "
    "ListBucketMultipartUploads on the bucket; set AWS_SERVER_SIDE_ENCRYPTION or AWS_REQUEST_PAYER=requester if its policy "
    "demands encryption or a payer"
)
_KEYS = "check the AWS credentials: variables, profile or role"
_CONFIGURATION = "check the AWS configuration: variables, ~/.aws/config, ~/.aws/credentials"
_CHECKSUM = "if this server does not know CRC64NVME checksums, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
_REGION = "set AWS_DEFAULT_REGION to the bucket's region"
_MISCONFIGURED = re.compile(
    r"(No|Partial|Unknown)Credential|Profile|Config|Token|SSO|Login|Refresh|ParamValidation|(No|Unknown|Invalid)(Region|Endpoint)"
)

ANSWERS = StoreAnswers(
    name="S3",
    refused={
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
        "EntityTooLarge": "this store limits the size of objects: raise its limit",
        "ExcessHeaderValues": _CHECKSUM,
        "InvalidRequest": _CHECKSUM,
        "InvalidArgument": _CHECKSUM,
        "NotImplemented": f"{ANOTHER}; {_CHECKSUM}",
        "MethodNotAllowed": ANOTHER,
    },
    refused_status={301: _REGION, 307: _REGION, 401: _KEYS, 403: _RIGHTS, 501: f"{ANOTHER}; {_CHECKSUM}"},
    # The condition was false (412), or could not be judged while another writer was at work (409; AWS, then Ceph).
    lost_races=("PreconditionFailed", "ConditionalRequestConflict", "ConcurrentModification"),
    spoilt=(
        *("BadDigest", "IncompleteBody", "MalformedXML", "NoSuchUpload"),
        *("XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    ),
    credentials=_KEYS,
    expired=(
        *("ExpiredToken", "InvalidToken", "InvalidTokenId", "TokenRefreshRequired"),  # the third is MinIO's
        *("InvalidAccessKeyId", "SignatureDoesNotMatch"),
    ),
    later="check the endpoint (AWS_ENDPOINT_URL) and the network, or try again later",
)


@contextlib.contextmanager
def boto_errors(operation: str, subject: str) -> Iterator[None]:
    """Turn what boto3 raises into raystow's errors."""
    try:
        yield
    except ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code", ""))
        if error.operation_name.startswith("AssumeRole") and status < 500:
            what = f"{operation} could not be sent: STS answered {error.operation_name} with {status} {code}".rstrip()
            raise StoreError(what, subject=subject, remedy=_KEYS) from None
        # Some servers give the status in the place of the code.
        raise ANSWERS.error(status, "" if code.isdigit() else code, operation=operation, subject=subject) from None
    except FlexibleChecksumError:
        what = f"the bytes that arrived for {operation} do not have the checksum that came with them"
        raise StoreUnavailable(what, subject=subject, remedy="try again: they were damaged in transit") from None
    except (BotoCoreError, HTTPError, OSError) as error:
        name = type(error).__name__
        if _MISCONFIGURED.search(name):
            raise StoreError(f"{operation} could not be sent: {name}", subject=subject, remedy=_CONFIGURATION) from None
        remedy = "set AWS_CA_BUNDLE if its certificate is your own" if "SSL" in name else ANSWERS.later
        raise StoreUnavailable(
            f"{operation} failed: {name}{silent_endpoint(str(error))}", subject=subject, remedy=remedy
        ) from None
    # The answer is not one of S3; and botocore follows redirects without a limit.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        missing = f": there is no {error} in the answer" if isinstance(error, KeyError) else ""
        what = f"{operation} failed: {type(error).__name__}{missing}"
        raise StoreUnavailable(what, subject=subject, remedy=ANSWERS.later) from None
    except RuntimeError as error:  # from botocore: what provides credentials gives some that have ended
        raise CredentialsRefused(f"{operation} could not be sent: {error}", subject=subject, remedy=_KEYS) from None
