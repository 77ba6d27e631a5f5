"""Requests whose credentials the server refuses meanwhile: keys that were rotated, tokens that have expired."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from helpers.key_gateway import KeyGateway, key_gateway
from helpers.s3_server import MOTO, moto

from conformance.scripted_server import Scripted
from raystow.storage.errors import CredentialsRefused, NotFound
from raystow.storage.runtime import background
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store
from raystow.storage.stores import settings as settings_module
from raystow.storage.stores.settings import JobSettings, StoreAddress, StoreSettings, settings_of

LARGE = bytes(17 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "2")  # on a page of a listing
        with moto() as endpoint:
            client(endpoint).create_bucket(Bucket="bucket")
            yield endpoint


def client(endpoint: str) -> Any:
    names = {"AWS_ACCESS_KEY_ID": "aws_access_key_id", "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key"}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **{names[n]: MOTO[n] for n in names})


class Keys:
    """A file of keys, and a gateway that accepts those in it only."""

    def __init__(self, gateway: KeyGateway, file: Path) -> None:
        self.gateway, self._file, self._number = gateway, file, 0
        self.rotate()

    def write(self) -> str:
        """Put other keys into the file."""
        self._number += 1
        key = f"key{self._number}"
        self._file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
        return key

    def rotate(self) -> None:
        """The same, and let the server accept only these."""
        self.gateway.accepted = {self.write()}


@pytest.fixture
def keys(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Keys]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with key_gateway(server) as gateway:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.endpoint)
        yield Keys(gateway, tmp_path / "credentials")


@pytest.fixture
def uri() -> str:
    return f"s3://bucket/t-{SYSTEM.token()}"


def given(
    uri: str, jobs: Callable[[], StoreSettings], *, asked: int = 1, patience: float = settings_module.RENEWAL
) -> JobSettings:
    """Settings as an actor has them: when it asks, ``asked`` processes of the job send theirs."""
    first = jobs()
    settings = JobSettings(StoreAddress(uri, first.place), ask=lambda: asked, patience=patience)
    settings.use(first)

    def ask() -> int:
        for _ in range(asked):
            background.start("rank", lambda: settings.use(jobs()))
        return asked

    settings.ask = ask
    return settings


@pytest.mark.parametrize("opened_by", ["the job", "an actor"])
def test_each_operation_goes_on_with_the_newest_keys(keys: Keys, uri: str, opened_by: str) -> None:
    settings = given(uri, lambda: settings_of(open_store(uri))) if opened_by == "an actor" else None
    store: Any = open_store(uri, settings=settings)
    assert list(store.list("")) == []
    names, small, large, tags = ["root.json", "versions/a", "versions/b"], b"small", bytearray(LARGE), []
    operations: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("versions/a", [small]),
        "put large": lambda: store.put("versions/b", [LARGE]),
        "put_if": lambda: tags.append(store.put_if("root.json", b"x", None)),
        "get": lambda: store.get("versions/a", max_bytes=9) == small,
        "get_tagged": lambda: store.get_tagged("root.json", max_bytes=9).tag == tags[0],
        "get_range": lambda: store.get_range("versions/a", 0, 5) == small,
        "get_range_into": lambda: store.get_range_into("versions/b", 0, memoryview(large)),
        "list": lambda: [entry.key for entry in store.list("")] == names,
        "unfinished": lambda: list(store.unfinished()) == [],
        "keeps_deleted": lambda: not store.keeps_deleted(),
        "delete": lambda: store.delete(names[1:]),
    }
    for name, operation in operations.items():
        keys.rotate()
        before = len(keys.gateway.seen)
        assert operation() in (None, True), name
        refused = {key for *_, key in keys.gateway.seen[before:]} - keys.gateway.accepted
        assert refused, name  # else the operation did not use the old keys
    assert [entry.key for entry in store.list("")] == ["root.json"]


def test_a_listing_goes_on_where_it_was_refused(keys: Keys, uri: str) -> None:
    """Its pages are requested one by one."""
    store, bucket = open_store(uri), client(os.environ["AWS_ENDPOINT_URL"])
    keys.gateway.accepted |= {MOTO["AWS_ACCESS_KEY_ID"]}
    names = [f"versions/{number}" for number in range(7)]
    for name in names:
        bucket.put_object(Bucket="bucket", Key=f"{uri.removeprefix('s3://bucket/')}/{name}")
    listed, found = store.list(""), []
    for entry in listed:
        found.append(entry.key)
        if len(found) == 3:
            keys.rotate()
    assert found == names


@pytest.mark.parametrize("asked", [0, 2])
def test_keys_without_a_successor_are_an_error_at_once(keys: Keys, uri: str, asked: int) -> None:
    """It is sent once if no process of the job is there, or if they all have the same keys."""
    store = open_store(uri, settings=given(uri, lambda: settings_of(open_store(uri)), asked=asked))
    keys.gateway.accepted = set()
    for opened in (store, open_store(uri)):
        before = len(keys.gateway.seen)
        with pytest.raises(CredentialsRefused, match=r"answered .*ExpiredToken"):
            opened.put_if("root.json", b"x", None)
        assert len(keys.gateway.seen) == before + 1


def test_a_job_that_sends_nothing_is_waited_for_in_vain(keys: Keys, uri: str) -> None:
    """Until the deadline."""
    silent = given(uri, lambda: settings_of(open_store(uri)), patience=0.1)
    silent.ask = lambda: 1
    keys.gateway.accepted = set()
    with pytest.raises(CredentialsRefused):
        open_store(uri, settings=silent).put("versions/a", [b"x"])


def test_refused_keys_do_not_replace_newer_ones(keys: Keys, uri: str) -> None:
    """Another job with the same repository, which has the old ones, may answer as well, and later."""
    old = settings_of(open_store(uri))
    keys.write()
    new = settings_of(open_store(uri))
    both = JobSettings(StoreAddress(uri, old.place), ask=lambda: both.use(new) or both.use(old) or 2)
    both.use(old)
    keys.gateway.accepted = {new.credentials["access_key"]}
    store = open_store(uri, settings=both)
    store.put("versions/a", [b"x"])
    assert both() == new


@pytest.mark.parametrize("kind", ["az", "gs"])
def test_other_clouds_are_asked_again_with_other_credentials(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    variables = {
        "az": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ENDPOINT", (403, "AuthenticationFailed")),
        "gs": ("GOOGLE_BEARER_TOKEN", "STORAGE_EMULATOR_HOST", (401, "AuthenticationRequired")),
    }
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    token, endpoint, refusal = variables[kind]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with Scripted([refusal]).running() as scripted:
        monkeypatch.setenv(endpoint, scripted.endpoint)
        monkeypatch.setenv(token, "sv=first")
        uri = f"{kind}://bucket/run"
        store = open_store(uri)
        with pytest.raises(CredentialsRefused):
            store.get("k", max_bytes=1)
        scripted.script[:] = [refusal, (404, "NoSuchKey")]
        monkeypatch.setenv(token, "sv=second")
        with pytest.raises(NotFound):
            store.get("k", max_bytes=1)
        assert len(scripted.requests) == 4
