"""Behaviour specific to the Azure and Google stores: configuration, deadlines, requests sent once, secrets in answers."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from helpers.builders import memory_repository, whole, write

import raystow
from conformance.scripted_server import SECRET, TOKEN, Scripted, failures, operations
from raystow.cli.checks.finding import Status
from raystow.cli.checks.store import check_store
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import (
    CredentialsRefused,
    Damaged,
    NotFound,
    PreconditionFailed,
    StateError,
    StoreError,
    StoreUnavailable,
)
from raystow.storage.stores import azure, open_store
from raystow.storage.stores.azure import AzureStore
from raystow.storage.stores.cloud import CloudStore
from raystow.storage.stores.gcs import GcsStore
from raystow.storage.stores.request_limits import RequestLimits
from raystow.storage.stores.settings import JobSettings, StoreAddress, place_of, settings_of

IMPATIENT = RequestLimits(connect_seconds=1, stall_seconds=0.7, request_seconds=1, retry_seconds=0.3)
ACCOUNT_KEY = base64.b64encode(SECRET.encode()).decode()


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Isolate the configuration: an account without credentials, and no service that issues them."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("IDENTITY_ENDPOINT", raising=False)
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/identity")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    return monkeypatch


@pytest.fixture
def server(request: pytest.FixtureRequest, clouds: pytest.MonkeyPatch) -> Iterator[Scripted]:
    with Scripted(request.param).running() as scripted:
        clouds.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
        clouds.setenv("AZURE_STORAGE_ENDPOINT", scripted.endpoint)
        clouds.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        clouds.setenv("STORAGE_EMULATOR_HOST", scripted.endpoint)
        yield scripted


@pytest.fixture
def store() -> CloudStore:
    return AzureStore("bucket", "run", limits=IMPATIENT)


@pytest.fixture
def google() -> CloudStore:
    return GcsStore("bucket", "run", limits=IMPATIENT)


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(401, "AuthenticationRequired")], CredentialsRefused),
        ([(403, "AccessDenied")], StoreError),
        ([(404, "NoSuchBucket")], StoreError),
        ([(503, "ServiceUnavailable")], StoreUnavailable),
    ],
    indirect=["server"],
)
def test_refusals_by_google_have_a_remedy_and_no_secrets(server: Scripted, google: CloudStore, kind: type[StoreError]) -> None:
    for name, error in failures(google).items():
        if name != "get_range empty" and not (name == "delete" and "NoSuchBucket" in str(server.script)):
            assert type(error) is kind, name
            assert error.remedy


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(412, "PreconditionFailed")], PreconditionFailed),
        ([(404, "NoSuchKey")], PreconditionFailed),
        ([(429, "SlowDown")], StoreUnavailable),
        ([(503, "ServiceUnavailable")], StoreUnavailable),
        ([(0, "stall")], StoreUnavailable),
    ],
    indirect=["server"],
)
@pytest.mark.parametrize("tag", ["1234", None])
def test_a_conditional_write_to_google_is_sent_once(
    server: Scripted, google: CloudStore, kind: type[StoreError], tag: str | None
) -> None:
    with pytest.raises(StoreError) as caught:
        google.put_if("root.json", b"x", tag)
    assert type(caught.value) is kind
    assert server.requests == ["PUT /bucket/run%2Froot%2Ejson"]


@pytest.mark.parametrize("server", [[(404, "NoSuchKey")]], indirect=True)
@pytest.mark.parametrize("variable", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
def test_a_google_key_travels_without_its_file(
    server: Scripted, clouds: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """The coordinator may be on a node that has no such file."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    names = {"client_email": "job@project", "private_key": text, "private_key_id": "1"}
    file = tmp_path / "key.json"
    file.write_text(json.dumps({"type": "service_account", **names}))
    clouds.delenv("GOOGLE_BEARER_TOKEN")
    clouds.setenv(variable, str(file))
    uri = "gs://bucket/run"
    settings = settings_of(open_store(uri))
    file.unlink()
    clouds.delenv(variable)
    given = JobSettings(StoreAddress(uri, settings.place))
    given.use(settings)
    with pytest.raises(NotFound):  # the key signs the request itself
        open_store(uri, settings=given).get("k", max_bytes=1)


def test_missing_google_credentials_are_reported(clouds: pytest.MonkeyPatch, google: CloudStore, tmp_path: Path) -> None:
    [(_, finding)] = check_store("gs://bucket/run")
    assert finding.status is Status.FAILED
    assert "GOOGLE_APPLICATION_CREDENTIALS" in finding.follows
    (tmp_path / "application_default_credentials.json").write_text(json.dumps({"type": SECRET}))
    with pytest.raises(StoreError, match=r"gs://bucket/run: the configuration does not make a client") as refused:
        google.get("k", max_bytes=1)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(403, "AuthenticationFailed")], CredentialsRefused),
        ([(403, "AuthorizationPermissionMismatch")], StoreError),
        ([(404, "ContainerNotFound")], StoreError),
        ([(412, "LeaseIdMissing")], StoreError),
        ([(503, "ServerBusy")], StoreUnavailable),
    ],
    indirect=["server"],
)
def test_refusals_have_a_remedy_and_no_secrets(server: Scripted, store: CloudStore, kind: type[StoreError]) -> None:
    for name, error in failures(store).items():
        if name == "get_range empty":  # the answer to HEAD has no body, so it has no error code
            continue
        assert type(error) is kind, name
        assert error.remedy


@pytest.mark.parametrize("server", [[(0, "stall")]], indirect=True)
@pytest.mark.parametrize("name", ["get", "get_range", "put", "put_if", "list"])
def test_a_stalled_request_raises_store_unavailable(server: Scripted, store: CloudStore, name: str) -> None:
    with pytest.raises(StoreUnavailable, match="az://bucket/run"):
        operations(store)[name]()


def test_a_refused_connection_raises_store_unavailable(clouds: pytest.MonkeyPatch, store: CloudStore) -> None:
    clouds.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    clouds.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    assert {type(error) for error in failures(store).values()} == {StoreUnavailable}


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ([(412, "ConditionNotMet")], PreconditionFailed),
        ([(409, "BlobAlreadyExists")], PreconditionFailed),
        ([(404, "BlobNotFound")], PreconditionFailed),
        ([(503, "ServerBusy")], StoreUnavailable),
        ([(500, "InternalError")], StoreUnavailable),
        ([(0, "stall")], StoreUnavailable),
    ],
    indirect=["server"],
)
@pytest.mark.parametrize("tag", ['"tag"', None])
def test_a_conditional_write_is_sent_once(server: Scripted, store: CloudStore, kind: type[StoreError], tag: str | None) -> None:
    with pytest.raises(StoreError) as caught:
        store.put_if("root.json", b"x", tag)
    assert type(caught.value) is kind
    assert server.requests == ["PUT /bucket/run/root.json"]


@pytest.mark.parametrize("server", [[(503, "ServerBusy"), (404, "BlobNotFound")]], indirect=True)
@pytest.mark.parametrize("name", ["get", "get_range"])
def test_a_failed_read_is_retried(server: Scripted, store: CloudStore, name: str) -> None:
    with pytest.raises(NotFound):
        operations(store)[name]()
    assert len(server.requests) == 2


@pytest.mark.parametrize("server", [[(501, "NotImplemented")], [(507, "")]], indirect=True)
@pytest.mark.parametrize("kind", [AzureStore, GcsStore])
def test_a_final_answer_is_not_asked_for_again(server: Scripted, kind: type[CloudStore]) -> None:
    for name, operation in operations(kind("bucket", "run")).items():
        server.requests.clear()
        with pytest.raises(StoreError, match=r"50[17]"):
            operation()
        assert len(server.requests) <= (2 if name == "put large" else 1), name  # its parts are sent at the same time


@pytest.mark.parametrize("server", [[(416, "InvalidRange")]], indirect=True)
def test_a_range_past_the_end_raises_damaged(server: Scripted, store: CloudStore) -> None:
    with pytest.raises(Damaged, match="az://bucket/run/k"):
        store.get_range("k", 5, 5)


@pytest.mark.parametrize("server", [[(404, "BlobNotFound")]], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_KEY": ACCOUNT_KEY, "AZURE_STORAGE_ENDPOINT": "{}"},
        {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_SAS_TOKEN": f"sv=2021&sig={TOKEN}", "AZURE_STORAGE_ENDPOINT": "{}"},
        {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=account;AccountKey={ACCOUNT_KEY};BlobEndpoint={{}}"},
    ],
)
def test_standard_azure_variables_configure_the_store(
    server: Scripted, clouds: pytest.MonkeyPatch, store: CloudStore, settings: dict[str, str]
) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "ENDPOINT"):
        clouds.delenv(f"AZURE_STORAGE_{name}")
    for name, value in settings.items():
        clouds.setenv(name, value.format(server.endpoint))
    with pytest.raises(NotFound):
        store.get("k", max_bytes=1)
    assert [request.split("?")[0] for request in server.requests] == ["GET /bucket/run/k"]


@pytest.mark.parametrize("server", [[(400, "")]], indirect=True)
@pytest.mark.parametrize("variable", ["IDENTITY_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "AZURE_MSI_ENDPOINT"])
def test_a_managed_identity_may_have_an_endpoint(
    server: Scripted, clouds: pytest.MonkeyPatch, store: CloudStore, variable: str
) -> None:
    clouds.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    clouds.delenv("AZURE_MSI_ENDPOINT")
    clouds.setattr(azure, "METADATA", "http://127.0.0.1:1")  # where Azure has no machine of one's own
    clouds.setenv(variable, f"{server.endpoint}/identity")
    with pytest.raises(StoreError, match="the request for credentials failed with 400"):
        store.get("k", max_bytes=1)
    assert server.requests[0].startswith("GET /identity?")


def test_missing_azure_credentials_are_reported(clouds: pytest.MonkeyPatch, store: CloudStore) -> None:
    with pytest.raises(StoreError, match=r"az://bucket/run: there are no credentials \(check the Azure credentials"):
        store.get("k", max_bytes=1)
    [(name, finding)] = check_store("az://bucket/run")
    assert (name, finding.status) == ("store", Status.FAILED)
    assert "AZURE_STORAGE_CONNECTION_STRING" in finding.follows
    clouds.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(StoreError, match="names no storage account"):
        store.get("k", max_bytes=1)


def test_an_address_with_credentials_is_rejected() -> None:
    with pytest.raises(StateError, match="into the Azure configuration") as refused:
        open_store(f"az://account:{SECRET}@bucket/run")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("kind", ["az", "gs"])
def test_doctor_accepts_a_working_store(request: pytest.FixtureRequest, kind: str) -> None:
    uri = request.getfixturevalue(f"{kind}_uri")
    found = {name: finding.status for name, finding in check_store(uri)}
    assert found["store"] is found["conditional writes"] is Status.OK
    assert list(open_store(uri).list("")) == []


def test_a_version_is_copied_through_every_kind_of_store(s3_uri: str, az_uri: str, gs_uri: str, tmp_path: Path) -> None:
    source = memory_repository()
    write(Committer(source, "training"), {"w": whole(np.arange(5000.0))})
    addresses = [source.uri, s3_uri, az_uri, gs_uri, str(tmp_path)]
    for before, after in pairwise(addresses):
        raystow.copy(before, after)
    assert raystow.open(addresses[-1]).latest().id == raystow.open(source.uri).latest().id


@pytest.mark.parametrize(
    ("uri", "variable", "mine"),
    [
        ("az://bucket/run", "AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY),
        ("gs://bucket/run", "GOOGLE_BEARER_TOKEN", TOKEN),
    ],
)
@pytest.mark.parametrize("server", [[(404, "NoSuchKey")]], indirect=True)
def test_a_job_uses_its_own_settings_or_none(
    server: Scripted, clouds: pytest.MonkeyPatch, uri: str, variable: str, mine: str
) -> None:
    """An actor has the environment of the job that made it: that of another job is refused by name, and not used."""
    settings = settings_of(open_store(uri))
    assert mine not in repr(settings)
    clouds.setenv(variable, base64.b64encode(b"other").decode())
    other = JobSettings(StoreAddress(uri, settings.place))
    other.use(settings)
    with pytest.raises(StoreError, match=f"another .*{variable}") as refused:
        open_store(uri, settings=other.given).get("root.json", max_bytes=10)
    assert mine not in str(refused.value)
    for name in (variable, "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME"):
        clouds.delenv(name)
    assert not server.requests
    with pytest.raises(NotFound):
        open_store(uri, settings=other.given).get("root.json", max_bytes=10)
    assert server.requests
    clouds.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    clouds.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    clouds.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    clouds.setenv(variable, mine)
    assert place_of(open_store(uri)) != settings.place
