"""Encryption by the server and requester pays: what the bucket's policy may demand of each request.

boto3 has no variables for these; their names are those of obstore.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..errors import StoreError
from .settings import StoreSettings

_VARIABLES = {
    "encryption": "AWS_SERVER_SIDE_ENCRYPTION",
    "kms_key": "AWS_SSE_KMS_KEY_ID",
    "bucket_key": "AWS_SSE_BUCKET_KEY_ENABLED",
    "payer": "AWS_REQUEST_PAYER",
    "customer_key": "AWS_SSE_CUSTOMER_KEY_BASE64",
}
_CUSTOMER = "sse-c"
_KINDS = "AES256", "aws:kms", "aws:kms:dsse", _CUSTOMER
_TRUE = "1", "true", "on", "yes", "y", "requester"


@dataclass(frozen=True)
class S3Options:
    """As the variables say; empty where one is not set.

    Attributes:
        encryption: ``AES256``, ``aws:kms``, ``aws:kms:dsse`` or ``sse-c``.
        kms_key: The id of the key for KMS.
        bucket_key: Whether to use a bucket key.
        payer: Whether the requester pays.
        customer_key: The key for ``sse-c``, in base64. Secret.
    """

    encryption: str = ""
    kms_key: str = ""
    bucket_key: str = ""
    payer: str = ""
    customer_key: str = field(default="", repr=False)

    @classmethod
    def of_environment(cls) -> S3Options:
        """Return those of this process. Raises ``StoreError`` if they are invalid."""
        options = cls(**{name: os.environ.get(variable, "") for name, variable in _VARIABLES.items()})
        if options.encryption not in ("", *_KINDS):
            raise _refused(f"{options.encryption!r:.50} is no kind of encryption", f"set one of {', '.join(_KINDS)}")
        if (options.encryption == _CUSTOMER) != bool(options.customer_key):
            raise _refused("sse-c and a key belong together", f"set {_VARIABLES['customer_key']}, too, or none of them")
        options.boto_parameters()
        return options

    @classmethod
    def of_settings(cls, settings: StoreSettings) -> S3Options:
        """Return those of a job. Raises ``StoreError`` if this process has others, which obstore would add."""
        given = {**settings.client, **settings.credentials}
        options = cls(**{name: given.get(name, "") for name in _VARIABLES})
        for name, variable in _VARIABLES.items():
            if os.environ.get(variable, "") not in ("", getattr(options, name)):
                remedy = "use one configuration for all jobs of the cluster, or end the other jobs and `ray.kill` their actors"
                raise StoreError(f"this process was made by a job with another {variable}", subject="S3", remedy=remedy)
        return options

    def client(self) -> dict[str, str]:
        """Return what is not secret, for ``StoreSettings.client``."""
        return {one.name: value for one in fields(self) if one.repr and (value := getattr(self, one.name))}

    def boto_parameters(self) -> dict[str, object]:
        """Return parameters of the operations of boto3 that have them. Raises ``StoreError`` if the customer's key is invalid."""
        parameters: dict[str, object] = {}
        if self.customer_key:
            try:
                key = base64.b64decode(self.customer_key, validate=True)
            except binascii.Error:
                key = b""
            if len(key) != 32:
                raise _refused("the customer's key is invalid", f"set {_VARIABLES['customer_key']} to 32 bytes in base64")
            parameters |= {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
        elif self.encryption:
            parameters["ServerSideEncryption"] = self.encryption
            if self.kms_key:
                parameters["SSEKMSKeyId"] = self.kms_key
            if self.bucket_key.lower() in _TRUE:
                parameters["BucketKeyEnabled"] = True
        if self.payer.lower() in _TRUE:
            parameters["RequestPayer"] = "requester"
        return parameters

    def obstore_config(self) -> Mapping[str, object]:
        """Return the same for obstore."""
        config: dict[str, object] = {"request_payer": self.payer.lower() in _TRUE}
        if self.encryption:
            config["server_side_encryption"] = self.encryption
        if self.customer_key:
            config["sse_customer_key_base64"] = self.customer_key
        if self.kms_key:
            config["sse_kms_key_id"] = self.kms_key
        if self.bucket_key:
            config["sse_bucket_key_enabled"] = self.bucket_key.lower() in _TRUE
        return config


def _refused(what: str, remedy: str) -> StoreError:
    return StoreError(what, subject=_VARIABLES["encryption"], remedy=remedy)
