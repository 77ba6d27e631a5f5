"""An S3 server for tests: moto in a separate process, or the server in ``RAYSTOW_TEST_S3`` (see tools/ceph_s3.sh)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import boto3
import pytest

from helpers.polling import wait_until

_START_SECONDS = 60.0
MOTO = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
_UNWANTED = ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION")


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Yield the endpoint of a server; the AWS_* variables of this process refer to it meanwhile, with credentials."""
    given = os.environ.get("RAYSTOW_TEST_S3")
    with pytest.MonkeyPatch.context() as environment:
        for name in _UNWANTED if given is None else _UNWANTED[1:2]:
            environment.delenv(name, raising=False)
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        if given is not None:
            environment.setenv("AWS_ENDPOINT_URL", given)
            yield given
            return
        with moto() as endpoint:
            for name, value in (MOTO | {"AWS_ENDPOINT_URL": endpoint}).items():
                environment.setenv(name, value)
            yield endpoint


def make_bucket(name: str) -> str:
    """Create bucket ``name`` if it does not exist; return its name."""
    client = boto3.client("s3")
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket=name)
    return name


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Start a new moto server, and yield its endpoint."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process, "the S3 server")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until a server process accepts connections."""

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with exit status {process.poll()}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_until(answers, f"{name} accepts connections", _START_SECONDS, pause=0.02)
