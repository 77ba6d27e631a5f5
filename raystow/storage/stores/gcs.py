"""A bucket of Google Cloud Storage as an object store; a tag is the object's generation.

Credentials come from the usual places: the file that GOOGLE_APPLICATION_CREDENTIALS names, a login of gcloud, or the machine's
service account (also GKE's workload identity).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from obstore.store import GCSStore as ObstoreGcs

from .cloud import METADATA, CloudStore, require_metadata
from .settings import StoreSettings
from .store_answers import ANOTHER, StoreAnswers

_RIGHTS = "this needs the role Storage Object User on the bucket"
_CREDENTIALS = (
    "check the Google credentials: GOOGLE_APPLICATION_CREDENTIALS (a service account's key), "
    "gcloud auth application-default login, or the machine's service account"
)

_ANSWERS = StoreAnswers(
    name="Google Cloud Storage",
    refused={
        "NoSuchBucket": "create the bucket, or correct the address",
        "InvalidBucketName": "correct the address",
        "AccessDenied": _RIGHTS,
        "AuthenticationRequired": _CREDENTIALS,
        "AccountProblem": "check the project's billing",
        "UserProjectAccountProblem": "check the project's billing",
        "UserProjectMissing": "use a bucket whose owner pays for requests",
        "RetentionPolicyNotMet": "remove the bucket's retention policy",
        "ObjectUnderActiveHold": "release the hold on the object",
        "NotImplemented": ANOTHER,
        "MethodNotAllowed": ANOTHER,
    },
    refused_status={401: _CREDENTIALS, 403: _RIGHTS, 501: ANOTHER},
    lost_races=("PreconditionFailed",),
    spoilt=("BadDigest", "IncompleteBody", "NoSuchUpload"),
    credentials=_CREDENTIALS,
    expired=("AuthenticationRequired", "ExpiredToken", "InvalidToken"),
    later="check the network, or try again later",
    token_request="token request",
)

_PROOFS = {
    "service_account": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "service_account_key": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "application_credentials": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "bearer_token": ("GOOGLE_BEARER_TOKEN",),
    "skip_signature": ("GOOGLE_SKIP_SIGNATURE",),
}
_FILES = "service_account", "application_credentials"


class GcsStore(CloudStore):
    """Objects under ``prefix`` of ``bucket``, reached as the Google configuration says. A lifecycle rule of the bucket
    (AbortIncompleteMultipartUpload) removes the parts of an upload that was never completed."""

    scheme, answers, client, endpoint_field, tag_field = "gs", _ANSWERS, ObstoreGcs, "base_url", "version"
    variables = _PROOFS

    def _configured(self, anew: bool) -> StoreSettings:
        settings = super()._configured(anew)
        return replace(settings, credentials=_with_key(settings.credentials))

    def _configuration(self) -> dict[str, object]:
        config = self._from_environment()
        if not config:
            login = (
                Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
                / "application_default_credentials.json"
            )
            if login.is_file():
                config["application_credentials"] = str(login)
            else:
                metadata = os.environ.get("GCE_METADATA_HOST")
                require_metadata(f"http://{metadata}" if metadata else METADATA, self.uri, _CREDENTIALS)
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        return config


def _with_key(config: Mapping[str, str]) -> Mapping[str, str]:
    """A configuration with the key of a service account in place of its file, which an actor's node may not have."""
    for field in _FILES:
        try:
            text = Path(config.get(field, "")).read_text()
            if json.loads(text)["type"] == "service_account":
                return {name: value for name, value in config.items() if name != field} | {"service_account_key": text}
        except (OSError, ValueError, LookupError, TypeError):
            continue  # what makes the client names the error
    return config
