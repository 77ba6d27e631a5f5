"""Behaviour specific to the S3 store: AWS configuration, deadlines, requests sent once, secrets in answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import UnknownServiceError
from botocore.loaders import Loader

from conformance.scripted_server import SECRET, TOKEN, Scripted, failures, operations
from raystow.storage.errors import CredentialsRefused, Damaged, NotFound, PreconditionFailed, StoreError, StoreUnavailable
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store, s3_clients
from raystow.storage.stores.request_limits import RequestLimits
from raystow.storage.stores.s3 import S3Store

pytestmark = pytest.mark.s3

IMPATIENT = RequestLimits(connect_seconds=1, stall_seconds=1, request_seconds=4, attempts=2, retry_seconds=1)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Isolate the AWS configuration: it contains only credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    return monkeypatch


@pytest.fixture
def server(request: pytest.FixtureRequest, aws: pytest.MonkeyPatch) -> Iterator[Scripted]:
    with Scripted(request.param).running() as scripted:
        aws.setenv("AWS_ENDPOINT_URL", scripted.endpoint)
        yield scripted


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(403, "AccessDenied")], StoreError),
        ([(403, "SignatureDoesNotMatch")], CredentialsRefused),
        ([(403, "InvalidAccessKeyId")], CredentialsRefused),
        ([(403, "ExpiredToken")], CredentialsRefused),
        ([(404, "NoSuchBucket")], StoreError),
        ([(503, "SlowDown")], StoreUnavailable),
        ([(500, "InternalError")], StoreUnavailable),
        ([(501, "NotImplemented")], StoreError),
        ([(409, "OperationAborted")], StoreUnavailable),
    ],
    indirect=["server"],
)
def test_refusals_have_a_remedy_and_no_secrets(server: Scripted, kind: type[StoreError]) -> None:
    for name, error in failures(S3Store("bucket", "run", limits=IMPATIENT)).items():
        # The answer to HEAD has no body, so it has no error code.
        unknown = {(404, "NoSuchBucket"): NotFound}.get(server.script[0], StoreError if kind is CredentialsRefused else kind)
        expected = unknown if name == "get_range empty" else kind
        assert type(error) is expected, name
        assert error.remedy or expected is NotFound


@pytest.mark.parametrize("server", [[(400, "InvalidIdentityToken")]], indirect=True)
def test_a_refused_web_identity_is_reported(server: Scripted, aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was said to be an answer of S3, and worth another try."""
    (tmp_path / "token").write_text(TOKEN)
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    aws.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(StoreError, match="STS answered AssumeRoleWithWebIdentity with 400") as refused:
        S3Store("bucket", "run", limits=IMPATIENT).get("k", max_bytes=9)
    assert type(refused.value) is StoreError
    assert not any(secret in str(refused.value) for secret in (SECRET, TOKEN))


@pytest.mark.long
def test_a_refused_connection_raises_store_unavailable(aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert {type(error) for error in failures(S3Store("bucket", "run", limits=IMPATIENT)).values()} == {StoreUnavailable}


@pytest.mark.parametrize("server", [[(0, "stall")]], indirect=True)
@pytest.mark.parametrize("name", ["get", "get_range", "put", "put_if", "list"])
def test_a_stalled_request_raises_store_unavailable_in_time(server: Scripted, name: str) -> None:
    store = S3Store("bucket", "run", limits=IMPATIENT)
    begin = SYSTEM.monotonic()
    with pytest.raises(StoreUnavailable, match="s3://bucket/run"):
        operations(store)[name]()
    assert SYSTEM.monotonic() - begin < 12


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(412, "PreconditionFailed")], PreconditionFailed),
        ([(409, "ConditionalRequestConflict")], PreconditionFailed),
        ([(409, "ConcurrentModification")], PreconditionFailed),
        ([(404, "NoSuchKey")], PreconditionFailed),
        ([(503, "SlowDown")], StoreUnavailable),
        ([(500, "InternalError")], StoreUnavailable),
        ([(400, "RequestTimeout")], StoreUnavailable),
        ([(0, "stall")], StoreUnavailable),
    ],
    indirect=["server"],
)
def test_a_conditional_write_is_sent_once(server: Scripted, kind: type[StoreError]) -> None:
    store = S3Store("bucket", "run", limits=IMPATIENT)
    with pytest.raises(StoreError) as caught:
        store.put_if("root.json", b"x", '"tag"')
    assert type(caught.value) is kind
    assert server.requests == ["PUT /bucket/run/root.json"]


@pytest.mark.parametrize("server", [[(503, "SlowDown"), (404, "NoSuchKey")]], indirect=True)
@pytest.mark.parametrize("name", ["get", "get_range"])
def test_a_failed_read_is_retried(server: Scripted, name: str) -> None:
    with pytest.raises(NotFound):
        operations(S3Store("bucket", "run", limits=IMPATIENT))[name]()
    assert len(server.requests) == 2


@pytest.mark.parametrize("server", [[(416, "InvalidRange")]], indirect=True)
def test_a_range_past_the_end_raises_damaged(server: Scripted) -> None:
    with pytest.raises(Damaged, match="s3://bucket/run/k"):
        S3Store("bucket", "run", limits=IMPATIENT).get_range("k", 5, 5)


@pytest.mark.parametrize("server", [[(404, "NoSuchKey")]], indirect=True)
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"])
def test_both_clients_follow_the_aws_configuration(
    server: Scripted, aws: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    aws.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    if variable == "profile":
        aws.delenv("AWS_ENDPOINT_URL")
        aws.setenv("AWS_PROFILE", "training")
        text = f"[profile training]\nregion = eu-west-1\nendpoint_url = {server.endpoint}\n"
        (tmp_path / "config").write_text(text)
        (tmp_path / "credentials").write_text(f"[training]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            aws.delenv(name)
    else:
        aws.setenv(variable, server.endpoint)
    store = S3Store("bucket", "run", limits=IMPATIENT)
    for name in ("get", "get_range"):
        with pytest.raises(NotFound):
            operations(store)[name]()
    assert [request.split("?")[0] for request in server.requests] == ["GET /bucket/run/k"] * 2


@pytest.mark.parametrize(
    ("endpoint", "config", "bucket", "expected"),
    [
        (None, "", "bucket", "https://bucket.s3.eu-west-1.amazonaws.com"),
        (None, "", "dotted.bucket", "https://s3.eu-west-1.amazonaws.com"),
        ("https://s3.example.com", "", "bucket", "https://s3.example.com"),
        ("https://s3.example.com", "s3 =\n  addressing_style = virtual\n", "bucket", "https://bucket.s3.example.com"),
        (None, "s3 =\n  addressing_style = path\n", "bucket", "https://s3.eu-west-1.amazonaws.com"),
    ],
)
def test_requests_go_to_the_configured_endpoint(
    aws: pytest.MonkeyPatch, tmp_path: Path, endpoint: str | None, config: str, bucket: str, expected: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{config}")
    aws.setenv("AWS_REGION", "eu-west-1")
    if endpoint:
        aws.setenv("AWS_ENDPOINT_URL", endpoint)
    clients = s3_clients.connect(s3_clients.S3Configuration(bucket), IMPATIENT)
    signed = clients.decide.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    assert signed.startswith(expected)
    for client in (clients.send, clients.fetch):
        assert client.config is not None
        assert client.config["endpoint"] == expected


@pytest.mark.parametrize("kind", ["service-2", "endpoint-rule-set-1", "paginators-1"])
def test_descriptions_of_services_are_those_of_botocore(kind: str) -> None:
    own, theirs = s3_clients.ServiceModels(), Loader()  # new ones, since clients change the descriptions
    assert own.load_service_model("s3", kind) == theirs.load_service_model("s3", kind)
    assert set(theirs.list_available_services(kind)) <= set(own.list_available_services(kind))
    with pytest.raises(UnknownServiceError):
        own.load_service_model("s4", kind)


def test_descriptions_of_services_in_a_users_folder_come_first(tmp_path: Path) -> None:
    (folder := tmp_path / "s3" / "2999-01-01").mkdir(parents=True)
    (folder / "service-2.json").write_text('{"metadata": {}}')
    folders = os.pathsep.join([str(tmp_path / "missing"), str(tmp_path)])
    assert s3_clients.service_models(folders).load_service_model("s3", "service-2") == {"metadata": {}}


def test_without_credentials_it_says_so(aws: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        aws.delenv(name)
    with pytest.raises(StoreError, match=r"s3://bucket: there are no AWS credentials \(set "):
        S3Store("bucket").get("k", max_bytes=1)
    aws.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="ProfileNotFound"):
        S3Store("bucket").get("k", max_bytes=1)


def test_a_forked_process_raises_instead_of_hanging(s3_uri: str) -> None:
    store = open_store(s3_uri)
    store.put("k", [b"x"])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.get_range("k", 0, 1)
        except StoreError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(store.get_range("k", 0, 1)) == b"x"


def test_a_missing_bucket_is_named(s3_endpoint: str) -> None:
    store = S3Store("no-such-bucket-anywhere", "run", limits=IMPATIENT)
    for name, operation in operations(store).items():
        if name == "get_range empty":
            continue
        with pytest.raises(StoreError, match=r"s3://no-such-bucket-anywhere/run.*create the bucket"):
            operation()


def test_folder_markers_and_other_prefixes_are_not_listed(s3_uri: str) -> None:
    store = open_store(s3_uri)
    store.put("versions/a", [b"x"])
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    for other in (f"{prefix}/", f"{prefix}/versions/", f"{prefix}/.hidden", f"{prefix}-next/versions/b"):
        boto3.client("s3").put_object(Bucket=bucket, Key=other, Body=b"")
    assert [info.key for info in store.list("")] == ["versions/a"]


def test_a_bucket_without_a_prefix_is_a_store(s3_bucket: str) -> None:
    store = S3Store(s3_bucket)
    store.put("probe-of-the-top", [b"x"])
    assert store.uri == f"s3://{s3_bucket}"
    assert [info.key for info in store.list("probe-of")] == ["probe-of-the-top"]
    store.delete(["probe-of-the-top"])
