"""S3 servers that differ from AWS: raystow works with them, or an error and ``raystow doctor`` say what to set."""

from __future__ import annotations

from collections.abc import Mapping

import boto3
import pytest
from picky_s3 import Policy, Refusal, picky_s3
from typer.testing import CliRunner

from raystow.orchestrator.cli.app import build
from raystow.orchestrator.cli.checks.finding import Status
from raystow.orchestrator.cli.checks.store import check_store
from raystow.storage.clock import SYSTEM
from raystow.storage.errors import StoreError
from raystow.storage.repository import create_repository
from raystow.storage.stores import open_store

pytestmark = pytest.mark.s3


def no_crc64(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    known = "x-amz-checksum-crc64nvme" not in headers and headers.get("x-amz-checksum-algorithm") != "CRC64NVME"
    return None if known else (400, "InvalidRequest")


def md5_required(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    return (400, "MissingContentMD5") if method == "POST" and "?delete" in path and "content-md5" not in headers else None


def no_batches(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    return (501, "NotImplemented") if method == "POST" and "?delete" in path else None


@pytest.mark.parametrize("policy", [md5_required, no_batches])
def test_objects_are_deleted_from_other_servers(s3_endpoint: str, s3_uri: str, policy: Policy) -> None:
    with picky_s3(s3_endpoint, policy):
        store = open_store(s3_uri)
        for name in "abc":
            store.put(f"versions/{name}", [b"x"])
        store.delete(["versions/a", "versions/missing", "versions/b"])
        assert [info.key for info in store.list("")] == ["versions/c"]


def test_an_unknown_checksum_names_the_variable_for_it(s3_endpoint: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with picky_s3(s3_endpoint, no_crc64) as server:
        with pytest.raises(StoreError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            open_store(s3_uri).put("versions/a", [b"x"])
        found = dict(check_store(s3_uri))
        assert found["writing"].status is Status.FAILED
        assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in found["writing"].follows
        assert server.refused
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        open_store(s3_uri).put("versions/a", [b"x"])
        assert all(finding.status is not Status.FAILED for _, finding in check_store(s3_uri))


def test_a_versioned_bucket_is_named_by_doctor_and_gc(s3_endpoint: str) -> None:
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
