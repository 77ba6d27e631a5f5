"""S3 servers that differ from AWS: raystow works with them, or an error and ``raystow doctor`` say what to set."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping

import boto3
import numpy as np
import pytest
from helpers.builders import whole, write
from helpers.picky_s3 import Policy, Refusal, picky_s3
from helpers.s3_server import MOTO, make_bucket, moto
from typer.testing import CliRunner

import raystow
from raystow.cli.app import build
from raystow.cli.checks.finding import Status
from raystow.cli.checks.store import check_store
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import StoreError, StoreFull
from raystow.storage.object_store import ObjectStore
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.storage.stores.request_limits import RequestLimits
from raystow.storage.stores.s3 import S3Store
from raystow.storage.stores.settings import JobSettings, StoreAddress


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


def demands(method: str, path: str, headers: Mapping[str, str], **needed: str) -> bool:
    return all(headers.get(f"x-amz-{name.replace('_', '-')}") == value for name, value in needed.items())


def kms_required(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    writes = (method == "PUT" and "partNumber" not in path) or (method == "POST" and "?uploads" in path)
    given = demands(method, path, headers, server_side_encryption="aws:kms", server_side_encryption_aws_kms_key_id="key-1")
    return (403, "AccessDenied") if writes and not given else None


def own_key_required(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    listing = method == "GET" and ("list-type" in path or "uploads" in path)
    of_object = (method in ("PUT", "GET") and not listing) or (method == "POST" and "?uploads" in path)
    given = demands(method, path, headers, server_side_encryption_customer_algorithm="AES256")
    return (403, "AccessDenied") if of_object and not given else None


def payer_required(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    return None if demands(method, path, headers, request_payer="requester") else (403, "AccessDenied")


PARTS = RequestLimits(single_put_bytes=1 << 20, part_bytes=5 << 20)
OPTIONS: list[tuple[Policy, dict[str, str]]] = [
    (kms_required, {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": "key-1"}),
    (
        own_key_required,
        {"AWS_SERVER_SIDE_ENCRYPTION": "sse-c", "AWS_SSE_CUSTOMER_KEY_BASE64": base64.b64encode(b"k" * 32).decode()},
    ),
    (payer_required, {"AWS_REQUEST_PAYER": "requester"}),
]


@pytest.mark.parametrize(("policy", "variables"), OPTIONS)
def test_every_request_carries_the_demands_of_a_policy(
    backend: str, uri: str, monkeypatch: pytest.MonkeyPatch, policy: Policy, variables: dict[str, str]
) -> None:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with picky_s3(backend, policy) as server:
        with pytest.raises(StoreError, match="AWS_SERVER_SIDE_ENCRYPTION or AWS_REQUEST_PAYER=requester"):
            open_store(uri).put("versions/a", [b"x"])
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            own = S3Store(bucket, prefix, limits=PARTS)
            settings = own.settings()
            assert variables.get("AWS_SSE_CUSTOMER_KEY_BASE64", "none") not in repr(settings)
            use(own)
        server.refused.clear()
        given = JobSettings(StoreAddress(uri, settings.place))
        given.use(settings)
        use(S3Store(bucket, prefix, limits=PARTS, given=given))  # in an actor of another job
        assert not server.refused
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms:dsse")
        with pytest.raises(StoreError, match="made by a job with another AWS_SERVER_SIDE_ENCRYPTION"):
            S3Store(bucket, prefix, given=given).put("versions/a", [b"x"])


def use(store: S3Store) -> None:
    """Send each kind of request."""
    large = b"x" * (6 << 20)
    store.put("versions/small", [b"abc"])
    store.put("versions/large", [large])
    tag = store.put_if("root.json", b"1", None)
    store.put_if("root.json", b"2", tag)
    assert store.get("root.json", max_bytes=9) == b"2"
    assert store.get_range("versions/large", 0, len(large)) == large
    assert [info.key for info in store.list("")] == ["root.json", "versions/large", "versions/small"]
    assert list(store.unfinished()) == []
    store.delete([info.key for info in store.list("")])


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_SERVER_SIDE_ENCRYPTION": "des"},
        {"AWS_SERVER_SIDE_ENCRYPTION": "sse-c"},
        {"AWS_SERVER_SIDE_ENCRYPTION": "sse-c", "AWS_SSE_CUSTOMER_KEY_BASE64": "c2hvcnQ="},
    ],
)
def test_invalid_options_are_refused(uri: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"AWS_SERVER_SIDE_ENCRYPTION: .*set ") as refused:
        open_store(uri).put("versions/a", [b"x"])
    assert "c2hvcnQ" not in str(refused.value)


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


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (507, "XMinioStorageFull")])
@pytest.mark.parametrize(
    ("request_line", "operation"),
    [
        ("PUT .*/k", lambda store: store.put("k", [b"x"])),
        (r"POST .*/k\?uploads", lambda store: store.put("k", [bytes(6 << 20)])),
        ("PUT .*partNumber=2", lambda store: store.put("k", [bytes(6 << 20)])),
        ("POST .*uploadId", lambda store: store.put("k", [bytes(6 << 20)])),
        ("GET .*/k", lambda store: store.get_range("k", 0, 9)),
        ("GET .*/k", lambda store: store.get("k", max_bytes=9)),
        ("HEAD .*/k", lambda store: store.get_range("k", 0, 0)),
        ("GET .*list-type", lambda store: list(store.list(""))),
    ],
)
def test_a_final_answer_is_not_asked_for_again(
    backend: str, uri: str, refusal: Refusal, request_line: str, operation: Callable[[ObjectStore], object]
) -> None:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")

    def policy(method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        return refusal if re.match(request_line, f"{method} {path}") else None

    with picky_s3(backend, policy) as server:
        with pytest.raises(StoreError, match=f"with {refusal[0]}"):
            operation(S3Store(bucket, prefix, limits=PARTS))
        assert len(server.refused) == 1


@pytest.mark.parametrize("refusal", [(507, ""), (403, "QuotaExceeded"), (400, "XMinioAdminBucketQuotaExceeded")])
def test_a_pin_in_a_full_store_says_what_frees_space(backend: str, uri: str, refusal: Refusal) -> None:
    repository = create_repository(uri)
    version = write(Committer(repository, "me"), {"w": whole(np.zeros(3))})
    with picky_s3(backend, lambda method, path, headers: refusal if method == "PUT" else None) as server:
        with pytest.raises(StoreFull, match="raystow gc --grace 0s"):
            raystow.open(uri).pin(version, "best")
        assert len(server.refused) == 1


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (507, "XMinioStorageFull"), (507, "")])
def test_doctor_repeats_no_final_answer(backend: str, uri: str, refusal: Refusal) -> None:
    with picky_s3(backend, lambda method, path, headers: refusal if method == "PUT" else None) as server:
        found = dict(check_store(uri))
        assert found["writing"].status is Status.FAILED
        assert len(server.refused) == 1
