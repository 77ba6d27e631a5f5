"""Fixtures that every floor's tests may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from s3_server import make_bucket, s3_server

from raystow.storage.clock import SYSTEM

_BUCKET = "raystow-tests"

# Nothing is asserted of time, also not by Hypothesis: a busy machine is no fault of the code.
settings.register_profile("raystow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raystow")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The endpoint of an S3 server; the AWS_* variables lead there until the session ends."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_bucket(s3_endpoint: str) -> str:
    """A bucket on that server."""
    return make_bucket(_BUCKET)


@pytest.fixture
def s3_uri(s3_bucket: str) -> str:
    """A fresh, empty ``s3://bucket/prefix`` for one test."""
    return f"s3://{s3_bucket}/t-{SYSTEM.token()}/run"
