"""The environment variables of stores."""

from __future__ import annotations

import os

import pytest


def refer_to(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Let S3, Azure and Google stores of this process use one server, with keys that no other accepts."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        patch.delenv(name)
    given = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey=YWFh;BlobEndpoint={endpoint}",
        "GOOGLE_BEARER_TOKEN": "a",
        "STORAGE_EMULATOR_HOST": endpoint,
    }
    for name, value in given.items():
        patch.setenv(name, value)
