"""S3 servers that differ from AWS: raystow works with them, or an error and ``raystow doctor`` say what to set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import boto3
import pytest
from picky_s3 import Policy, Refusal, picky_s3
from s3_server import MOTO, make_bucket, moto
from typer.testing import CliRunner

from raystow.orchestrator.cli.app import build
from raystow.orchestrator.cli.checks.finding import Status
from raystow.orchestrator.cli.checks.store import check_store
from raystow.storage.clock import SYSTEM
from raystow.storage.errors import StoreError
from raystow.storage.repository import create_repository
from raystow.storage.stores import open_store


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    """Yield the endpoint of a server with a bucket; this process's variables refer to it meanwhile."""
    with moto() as endpoint, pytest.MonkeyPatch.context() as environment:
        for name, value in {**MOTO, "AWS_ENDPOINT_URL": endpoint}.items():
            environment.setenv(name, value)
        make_bucket("picky")
        yield endpoint


@pytest.fixture
def uri(backend: str) -> str:
    return f"s3://picky/t-{SYSTEM.token()}/run"


def no_crc64(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    known = "x-amz-checksum-crc64nvme" not in headers and headers.get("x-amz-checksum-algorithm") != "CRC64NVME"
    return None if known else (400, "InvalidRequest")


def md5_required(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    return (400, "MissingContentMD5") if method == "POST" and "?delete" in path and "content-md5" not in headers else None


def no_batches(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    return (501, "NotImplemented") if method == "POST" and "?delete" in path else None


@pytest.mark.parametrize("policy", [md5_required, no_batches])
def test_objects_are_deleted_from_other_servers(backend: str, uri: str, policy: Policy) -> None:
    with picky_s3(backend, policy):
        store = open_store(uri)
        for name in "abc":
            store.put(f"versions/{name}", [b"x"])
        store.delete(["versions/a", "versions/missing", "versions/b"])
        assert [info.key for info in store.list("")] == ["versions/c"]


def test_an_unknown_checksum_names_the_variable_for_it(backend: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with picky_s3(backend, no_crc64) as server:
        with pytest.raises(StoreError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            open_store(uri).put("versions/a", [b"x"])
        found = dict(check_store(uri))
        assert found["writing"].status is Status.FAILED
        assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in found["writing"].follows
        assert server.refused
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        open_store(uri).put("versions/a", [b"x"])
        assert all(finding.status is not Status.FAILED for _, finding in check_store(uri))


def test_a_versioned_bucket_is_named_by_doctor_and_gc(backend: str) -> None:
    client, name = boto3.client("s3"), f"raystow-versioned-{SYSTEM.token()}"
    client.create_bucket(Bucket=name)
    uri = f"s3://{name}/run"
    assert dict(check_store(uri))["deleted objects"].status is Status.OK
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    finding = dict(check_store(uri))["deleted objects"]
    assert finding.status is Status.WARNING
    assert "NoncurrentVersionExpiration" in finding.follows
    create_repository(uri).store.put(f"versions/00000001-{SYSTEM.token()}/weights-00000-00000.pack", [b"x"])
    ended = CliRunner().invoke(build(), ["gc", uri, "--grace", "0s", "--yes"])
    assert ended.exit_code == 0
    assert "NoncurrentVersionExpiration" in " ".join(ended.output.split())
