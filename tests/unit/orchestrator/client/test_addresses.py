"""A mistyped or unsupported address is refused, and never becomes a local folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raystow
from raystow import dcp
from raystow.storage.errors import StateError
from raystow.storage.format import key_files
from raystow.storage.stores import open_store

MEANT = {
    "s3:bucket/x": "s3://bucket/x",
    "s3//bucket/x": "s3://bucket/x",
    "s3:/bucket/x": "s3://bucket/x",
    "s3:///bucket/x": "s3://bucket/x",
    "s3:\\\\bucket/x": "s3://bucket/x",
    "S3:bucket/x": "s3://bucket/x",
    "S3//bucket/x": "s3://bucket/x",
    "s3a://bucket/x": "s3://bucket/x",
    "s3n://bucket/x": "s3://bucket/x",
    "s3a:bucket/x": "s3://bucket/x",
    "minio://bucket/x": "s3://bucket/x",
    "r2://bucket/x": "s3://bucket/x",
    "https://bucket.s3.amazonaws.com/x": "s3://bucket/x",
    "https://my.bucket.s3.eu-west-1.amazonaws.com/x": "s3://my.bucket/x",
    "https://s3.eu-west-1.amazonaws.com/bucket/x": "s3://bucket/x",
    "https://s3.amazonaws.com/bucket/x": "s3://bucket/x",
    "https//bucket.s3.amazonaws.com/x": "s3://bucket/x",
    "bucket.s3.amazonaws.com/x": "s3://bucket/x",
    "gs:bucket/x": "gs://bucket/x",
    "gs//bucket/x": "gs://bucket/x",
    "gcs://bucket/x": "gs://bucket/x",
    "https://storage.googleapis.com/bucket/x": "gs://bucket/x",
    "https://bucket.storage.googleapis.com/x": "gs://bucket/x",
    "az:bucket/x": "az://bucket/x",
    "az//bucket/x": "az://bucket/x",
    "azure://bucket/x": "az://bucket/x",
    "abfs://bucket/x": "az://bucket/x",
    "abfss://bucket@account.dfs.core.windows.net/x": "az://bucket/x",
    "wasb://bucket@account.blob.core.windows.net/x": "az://bucket/x",
    "wasbs:bucket/x": "az://bucket/x",
    "https://account.blob.core.windows.net/bucket/x": "az://bucket/x",
    "memory:x": "memory://x",
    "file:x": "./x",
    "file//x": "file:///x",
}
"""What is written, and what it says was meant."""

UNKNOWN = {
    "hdfs://name/x": "no address",
    "hf://org/name": "no address",
    "hdfs//name/x": "no address",
    "ftp:x": "no address",
    "data:v2": "no address",
    "host:/export/x": "no address",
    "10.0.0.1:9000/bucket": "no address",
    "s3;\\bucket": "no address",
    "C:\\x": "Windows",
    "C:/x": "Windows",
    "\\\\server\\x": "Windows",
    " s3://bucket/x": "space",
    "s3://bucket/x ": "space",
    "x ": "space",
    "$BUCKET/x": "variable",
    "s3://$BUCKET/x": "variable",
    "s3://bucket/$RUN": "variable",
    "${RUN}": "variable",
    "runs/${RUN}": "variable",
    "file:///runs/$RUN": "variable",
}
LOCAL = ["x", "runs/a:b/x", "./s3:x", "../s3:x", "./data:v2", "s3/bucket/x", "az/x", "x//y", "a.b", "...", "~/s3:x", "5%"]
VALID = {
    "S3://bucket/x": "s3://bucket/x",
    "GS://bucket/x": "gs://bucket/x",
    "az://bucket": "az://bucket",
    "s3://bucket/a:b/c": "s3://bucket/a:b/c",
    "file:/a": "file:///a",
    "file:///a/%24x": "file:///a/%24x",
    "memory://x": "memory://x",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which nothing may appear."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("text", "meant"), MEANT.items())
def test_the_error_says_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(StateError, match="use s3://bucket/prefix, gs://") as refused:
        open_store(text)
    assert refused.value.what.endswith(f"did you mean {meant}?")
    assert open_store(meant).uri


@pytest.mark.parametrize(("text", "what"), UNKNOWN.items())
def test_other_texts_than_addresses_are_refused(text: str, what: str) -> None:
    with pytest.raises(StateError, match=what):
        open_store(text)


@pytest.mark.parametrize("text", LOCAL)
def test_other_paths_are_local(text: str, home: Path) -> None:
    path = Path(os.path.abspath(home / Path(text).expanduser()))
    assert open_store(text).uri == path.as_uri()
    if not text.startswith(("./", "../", "~")):  # Path removes the dot
        assert open_store(os.fspath(Path(text))).uri == path.as_uri()
    assert open_store(path.as_uri()).uri == open_store(str(path)).uri == path.as_uri()


@pytest.mark.parametrize(("text", "uri"), VALID.items())
def test_valid_addresses_are_taken(text: str, uri: str) -> None:
    assert open_store(text).uri == uri


@pytest.mark.parametrize(
    "text",
    [
        "s3:AKIA:hush@bucket/x",
        "https://u:hush@host/x",
        "https://b.s3.amazonaws.com/x?X-Amz-Signature=hush",
        "wasbs://c:hush@a/x",
        "s3://AKIA:hush",
        "az://c?sig=hush/x",
    ],
)
def test_no_message_repeats_credentials(text: str) -> None:
    with pytest.raises(StateError) as refused:
        open_store(text)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("bucket", ["", "b", "ab", "-bucket", "bucket-", "my bucket", "b" * 256, "bück"])
def test_names_of_no_bucket_are_refused_without_credentials(scheme: str, bucket: str) -> None:
    with pytest.raises(StateError, match="is no bucket name: it has 3 to 255 letters") as refused:
        open_store(f"{scheme}://{bucket}{'/x' if bucket else ''}")
    assert repr(bucket) in refused.value.what
    assert "credential" not in str(refused.value)
    assert refused.value.remedy == "correct the address"


ADDRESSES: list[Callable[[Any], object]] = [
    lambda uri: raystow.Checkpointer(uri, rank=0, world_size=1),
    raystow.open,
    raystow.latest,
    lambda uri: raystow.restore(uri, {}),
    lambda uri: raystow.copy("memory://source", uri),
    lambda uri: raystow.copy(uri, "memory://source"),
    dcp.Writer,
    dcp.Reader,
]


@pytest.mark.parametrize("function", ADDRESSES)
@pytest.mark.parametrize("uri", ["s3:bucket/x", "s3//bucket/x", Path("s3://bucket/x")])
def test_every_function_refuses_a_mistyped_address(function: Callable[[Any], object], uri: str | Path, home: Path) -> None:
    with pytest.raises(StateError, match=r"did you mean s3://bucket/x\?"):
        function(uri)
    assert not any(home.iterdir())


@pytest.mark.parametrize("path", ["s3://bucket/keys", "s3:bucket/keys", "file:///keys", Path("s3://bucket/keys")])
def test_keys_are_local_files(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="trusted_keys is an address, not a local path"):
        raystow.open("memory://keys", trusted_keys=path)
    for variable, read in ((key_files.TRUSTED_KEYS, key_files.trust), (key_files.SIGNING_KEY, key_files.signer)):
        monkeypatch.setenv(variable, os.fspath(path))
        with pytest.raises(StateError, match=f"{variable} is an address, not a local path"):
            read()
