"""Azurite, Microsoft's emulator of Azure Blob Storage, in a separate process. ``make azurite`` installs it from npm."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.s3_server import free_port, wait_for

ACCOUNT = "devstoreaccount1"
# Documented by Microsoft; equal in every installation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

OTHER_ACCOUNT = "otherstoreaccount1"
OTHER_KEY = base64.b64encode(b"the key of the other account").decode()

_FOLDER = Path(os.environ.get("AZURITE_HOME") or Path.home() / ".cache" / "raystow-azurite")
_SCRIPT = "node_modules/azurite/dist/src/blob/main.js"


@contextlib.contextmanager
def azure_server() -> Iterator[str]:
    """Yield the endpoint of an account; the AZURE_* variables of this process refer to it meanwhile, with credentials. The other
    account has an endpoint, too."""
    script, node = _FOLDER / _SCRIPT, shutil.which("node")
    if node is None or not script.is_file():
        pytest.skip("Azurite is not installed: make azurite (needs Node)")
    port = free_port()
    command = [node, str(script), "--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    accounts = os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY};{OTHER_ACCOUNT}:{OTHER_KEY}"}
    process = subprocess.Popen(command, env=accounts, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process, "Azurite")
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        with pytest.MonkeyPatch.context() as environment:
            for name in [name for name in os.environ if name.startswith("AZURE_")]:
                environment.delenv(name)
            environment.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(endpoint))
            yield endpoint
    finally:
        process.kill()
        process.wait()


def connection_string(endpoint: str) -> str:
    """Return what tells Azure's tools how to reach the account at ``endpoint``."""
    return f"AccountName={_account(endpoint)};AccountKey={_key(endpoint)};BlobEndpoint={endpoint};"


def make_container(endpoint: str, name: str) -> str:
    """Create container ``name``, because obstore creates none; return its name."""
    account = _account(endpoint)
    headers = f"x-ms-date:{email.utils.formatdate(usegmt=True)}\nx-ms-version:2021-08-06"
    signed = "PUT" + "\n" * 12 + f"{headers}\n/{account}/{account}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(_key(endpoint)), signed.encode(), hashlib.sha256)).decode()
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers={"Content-Length": "0"})
    for line in headers.splitlines():
        request.add_header(*line.split(":", 1))
    request.add_header("Authorization", f"SharedKey {account}:{signature}")
    urllib.request.urlopen(request).close()
    return name


def _account(endpoint: str) -> str:
    return endpoint.rpartition("/")[2]


def _key(endpoint: str) -> str:
    return KEY if _account(endpoint) == ACCOUNT else OTHER_KEY
