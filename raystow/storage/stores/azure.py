"""A container of Azure Blob Storage as an object store; a tag is the blob's ETag.

Account, credentials and endpoint come from the usual variables of Azure's tools (a connection string, an account with a key, a
SAS token, a service principal), a workload identity, a login of the Azure CLI, or the machine's managed identity.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from obstore.store import AzureStore as ObstoreAzure

from ..errors import StoreError
from .cloud import METADATA, CloudStore, require_metadata
from .store_answers import ANOTHER, StoreAnswers

_RIGHTS = "this needs the role Storage Blob Data Contributor, or a SAS token that reads, writes, lists and deletes"
_CREDENTIALS = (
    "check the Azure credentials: AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, "
    "AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, a workload or managed identity, or az login"
)
_LEASED = "break the lease on the blob"

_ANSWERS = StoreAnswers(
    name="Azure",
    refused={
        "ContainerNotFound": "create the container, or correct the address",
        "ContainerBeingDeleted": "create the container again, or correct the address",
        "ContainerDisabled": "enable the container",
        "InvalidResourceName": "correct the address",
        "AccountIsDisabled": "enable the storage account",
        "AuthenticationFailed": f"{_CREDENTIALS}, and this machine's clock",
        "InvalidAuthenticationInfo": _CREDENTIALS,
        "NoAuthenticationInformation": _CREDENTIALS,
        "AuthorizationFailure": f"{_RIGHTS}, and a network that the account's firewall admits",
        "AuthorizationPermissionMismatch": _RIGHTS,
        "InsufficientAccountPermissions": _RIGHTS,
        "BlobImmutableDueToPolicy": "remove the container's immutability policy",
        "LeaseIdMissing": _LEASED,
        "InvalidBlobType": "the address has blobs of another type: use another prefix",
        "FeatureNotSupported": ANOTHER,
    },
    refused_status={401: _CREDENTIALS, 403: _RIGHTS, 501: ANOTHER},
    lost_races=("BlobAlreadyExists", "ConditionNotMet"),
    spoilt=("Md5Mismatch", "InvalidBlockList", "InvalidBlobOrBlock"),
    credentials=_CREDENTIALS,
    expired=("AuthenticationFailed", "InvalidAuthenticationInfo"),
    later="check the endpoint (AZURE_STORAGE_ENDPOINT) and the network, or try again later",
    token_request="token request",
)

# Each is one way to prove who one is; without any, only an identity of the machine or the CLI's login is left.
_PROOFS = ("account_key", "sas_key", "token", "client_secret", "federated_token_file", "use_azure_cli", "skip_signature")
_VARIABLES = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_KEY"),
    "sas_key": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "token": ("AZURE_STORAGE_TOKEN",),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    "federated_token_file": ("AZURE_FEDERATED_TOKEN_FILE",),
    "use_azure_cli": ("AZURE_USE_AZURE_CLI",),
    "skip_signature": ("AZURE_SKIP_SIGNATURE",),
    "client_id": ("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID", "AZURE_STORAGE_AUTHORITY_ID", "AZURE_TENANT_ID", "AZURE_AUTHORITY_ID"),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "authority_host": ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST"),
    "msi_endpoint": ("IDENTITY_ENDPOINT", "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT"),
    "msi_resource_id": ("AZURE_MSI_RESOURCE_ID",),
    "object_id": ("AZURE_OBJECT_ID",),
    "credential_type": ("AZURE_CREDENTIAL_TYPE",),
    "encryption_key": ("AZURE_STORAGE_ENCRYPTION_KEY",),
}
_CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}


class AzureStore(CloudStore):
    """Blobs under ``prefix`` of container ``bucket``, reached as the Azure configuration says. Azure removes the blocks of an
    upload that was never completed after a week."""

    scheme, answers, client, endpoint_field, tag_field = "az", _ANSWERS, ObstoreAzure, "endpoint", "e_tag"
    variables = _VARIABLES

    def _configuration(self) -> dict[str, object]:
        """See ``CloudStore``. Raises ``StoreError`` also if there is no account."""
        config = self._from_environment()
        pairs = (pair.strip().partition("=") for pair in os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";"))
        connection = {field: value for field, _, value in pairs if value}
        if {"AccountName", "EndpointSuffix"} <= connection.keys():
            connection.setdefault("BlobEndpoint", f"https://{connection['AccountName']}.blob.{connection['EndpointSuffix']}")
        for field, name in _CONNECTION_STRING.items():
            if field in connection:
                config.setdefault(name, connection[field])
        if "account_name" not in config:
            remedy = "set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
            raise StoreError("the Azure configuration names no storage account", subject=self.uri, remedy=remedy)
        if any(name in config for name in _PROOFS):
            return config
        if _has_cli_login():
            return config | {"use_azure_cli": True}
        require_metadata(str(config.get("msi_endpoint", METADATA)), self.uri, _CREDENTIALS)
        return config


def _has_cli_login() -> bool:
    folder = Path(os.environ.get("AZURE_CONFIG_DIR") or "~/.azure").expanduser()
    return (folder / "azureProfile.json").is_file() and shutil.which("az") is not None
