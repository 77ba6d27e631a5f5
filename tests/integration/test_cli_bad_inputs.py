"""Any input to the command line and the API ends in success or an error of raystow, never in a traceback.

The commands run in this process. Commands that need a Ray cluster or measure the machine are excluded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.no_ray import refuse_cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raystow
from integration.bad_inputs import ADDRESSES, FILES, PLACES, check_command, command_lines, make, texts
from integration.cli_runner import ran
from raystow.storage.object_store import ObjectStore
from raystow.storage.stores.cloud import CloudStore
from raystow.storage.stores.local import LocalStore
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.stores.request_limits import RequestLimits
from raystow.storage.stores.s3 import S3Store

FEW, MANY = 15, 2000
HURRY = RequestLimits(connect_seconds=1, stall_seconds=0.2, request_seconds=0.3, attempts=1, retry_seconds=0.2)
NOWHERE = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=YWFh;BlobEndpoint=http://127.0.0.1:9",
    "GOOGLE_BEARER_TOKEN": "a",
    "STORAGE_EMULATOR_HOST": "127.0.0.1:9",
}

ended = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], print_blob=True)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("bad-inputs"))


@pytest.fixture
def base(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    for kind in (S3Store, CloudStore):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, "limits", HURRY)
    refuse_cluster(monkeypatch, raystow.ClusterError("no Ray cluster is running here"))
    return originals


@settings(ended, max_examples=FEW, derandomize=True)
@given(words=command_lines())
def test_random_commands_succeed_or_report_an_error(base: Path, tmp_path: Path, words: list[str]) -> None:
    check_command(base, tmp_path / "copy", words)


@pytest.mark.parametrize(
    "words", [["restore", "--output", "x", "--max-file-size"], ["gc", "--grace"]], ids=lambda words: words[0]
)
def test_an_infinite_quantity_is_refused(base: Path, tmp_path: Path, words: list[str]) -> None:
    """Hypothesis found these inputs with ``test_many_commands_succeed_or_report_an_error``."""
    check_command(base, tmp_path / "copy", [words[0], "@good", *words[1:], "9" * 400])


@pytest.mark.slow
@settings(ended, max_examples=MANY)
@given(words=command_lines())
def test_many_commands_succeed_or_report_an_error(base: Path, tmp_path: Path, words: list[str]) -> None:
    check_command(base, tmp_path / "copy", words)


@pytest.mark.parametrize("file", FILES)
def test_import_refuses_invalid_files(base: Path, tmp_path: Path, file: str) -> None:
    check_command(base, tmp_path / "copy", ["import", f"@files/{file}", "@good"])


EVERYWHERE = {
    "verify": ["--deep", "--all"],
    "restore": ["--output", "out\udcff"],
    "export": ["--torch", "weights.pt"],
    "repair": ["--yes"],
    "cp": ["@empty"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", EVERYWHERE)
def test_commands_report_every_damaged_repository(base: Path, tmp_path: Path, command: str) -> None:
    """The output path contains a character that terminals cannot print."""
    for number, place in enumerate([f"@{name}" for name in PLACES] + ADDRESSES):
        (tmp_path / str(number)).mkdir()
        with contextlib.chdir(tmp_path / str(number)) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
            check_command(base, tmp_path / "copy", [command, place, *EVERYWHERE[command]])


any_values = st.one_of(
    texts,
    *(st.none(), st.booleans(), st.integers(-3, 5), st.floats(), st.binary(max_size=5)),
    st.sampled_from([10**30, -(2**63), 2**63 - 1, [], {}, (), object(), 1j, [1, 2], (None,), np.int64(3), np.float32(2)]),
    st.sampled_from([slice(0, 5), slice(None, None, -1), slice("a"), slice(0, 5, 0), ..., (..., ...), (slice(0, 3), 1)]),
    st.sampled_from([np.array([1, 2]), torch.ones(2)]),
)
states = any_values | st.sampled_from(
    [
        {"model": {"w": np.zeros(1000, np.float32)}, "step": 0, "e": b""},
        *({"model": {"w": torch.zeros(1000)}}, {"model": {"w": torch.zeros(1000).to_sparse()}}, {"model": {"w": "text"}}),
        *(
            {"model": [1, 2]},
            {"model": {"w": np.array(["a"])}},
            {"model": {"w": np.zeros(1000, object)}},
            {1: 2, "1": 3},
            {None: 1},
        ),
        *({"model": {"w": torch.zeros(1000, requires_grad=True)}}, {"model": {"w": torch.zeros(1000, device="meta")}}),
    ]
)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def _options(draw: Draw, function: Callable[..., Any], *, most: int = 3) -> dict[str, Any]:
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "uri")]
    return {name: draw(any_values) for name in draw(st.lists(st.sampled_from(names), max_size=most, unique=True))}


def call_api(draw: Draw, base: Path) -> object:
    """Call a random function of the public API with arguments of any type."""
    place = st.sampled_from([str(base / name) for name in PLACES])
    uri = place | st.sampled_from(ADDRESSES) | any_values
    name, into, which = st.sampled_from(["model.w", "step", "x"]) | any_values, states, any_values | st.just("latest")

    def repository(at: st.SearchStrategy[Any] = st.just(str(base / "good"))) -> raystow.Repository:  # noqa: B008
        return raystow.open(draw(at))

    def version(at: st.SearchStrategy[Any] = st.just(str(base / "good"))) -> raystow.Version:  # noqa: B008
        found = repository(at).latest()
        if found is None:
            raise raystow.NotFound("no version")
        return found

    calls: list[Callable[[], object]] = [
        lambda: raystow.open(draw(uri), trusted_keys=draw(any_values)),
        lambda: raystow.latest(draw(uri)),
        lambda: repository().version(draw(any_values)),
        lambda: version(place).read(draw(name), draw(any_values)),
        lambda: version(uri).tensors(),
        lambda: version().values(draw(any_values)),
        lambda: raystow.restore(version(), draw(into)),
        lambda: raystow.restore(draw(uri), draw(into), draw(which), strict=draw(st.booleans()), cast=draw(st.booleans())),
        lambda: raystow.restore_latest(str(base / "good"), draw(into)),
        lambda: raystow.copy(draw(uri), draw(st.sampled_from(ADDRESSES) | any_values), draw(any_values), memory=draw(any_values)),
        lambda: repository().plan_retention(draw(any_values | st.builds(raystow.Policy))),
        lambda: repository().pin(version(), draw(any_values)),
        lambda: repository().unpin(draw(any_values)),
        lambda: repository().verify(version(place)),
        lambda: raystow.Policy(**_options(draw, raystow.Policy)),
        lambda: raystow.Memory(**_options(draw, raystow.Memory)),
        lambda: raystow.Compression(**_options(draw, raystow.Compression)),
        lambda: raystow.Replication(**_options(draw, raystow.Replication)),
        lambda: raystow.MantissaBits(draw(any_values)),
        lambda: raystow.Sqnr(draw(any_values)),
        lambda: raystow.Checkpointer(draw(uri), **_options(draw, raystow.Checkpointer)),
    ]
    return draw(st.sampled_from(calls))()


def check_call(data: st.DataObject, base: Path) -> None:
    with contextlib.suppress(raystow.RaystowError):
        call_api(data.draw, base)


@settings(ended, max_examples=3 * FEW, derandomize=True)
@given(data=st.data())
def test_random_api_calls_succeed_or_raise_an_error(base: Path, data: st.DataObject) -> None:
    check_call(data, base)


@pytest.mark.slow
@settings(ended, max_examples=MANY)
@given(data=st.data())
def test_many_api_calls_succeed_or_raise_an_error(base: Path, data: st.DataObject) -> None:
    check_call(data, base)


KEYS = ["", "/", "..", "a/../b", "a\x00b", "a\udcff", "é", "x" * 300, "a/" * 200 + "b", "a//b", "a/", "/a", ".", "a\nb", "a\\b"]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store") if request.param == "local" else MemoryStore("bad-keys")


@pytest.mark.parametrize("key", KEYS)
def test_stores_refuse_strange_keys(store: ObjectStore, key: str) -> None:
    calls: list[Callable[[], object]] = [
        *(lambda: store.get(key, max_bytes=10), lambda: store.get_range(key, 0, 1), lambda: store.get_tagged(key, max_bytes=5)),
        *(lambda: store.put(key, [b"x"]), lambda: store.put_if(key, b"x", None), lambda: list(store.list(key))),
        lambda: store.delete([key]),
    ]
    for call in calls:
        with contextlib.suppress(raystow.RaystowError):
            call()


def test_an_unprintable_output_path_is_escaped(base: Path, tmp_path: Path) -> None:
    check_command(base, tmp_path / "copy", ["restore", "@good", "--output", str(tmp_path / "out\udcff")])
    assert (tmp_path / "out\udcff" / "weights.safetensors").is_file()


@pytest.mark.parametrize("address", ["s3:bucket/x", "s3//bucket/x", "$RUN/x", "hdfs://bucket/x"])
@pytest.mark.parametrize("words", [("restore", "-o"), ("export", "--hf")])
def test_a_mistyped_target_is_refused(base: Path, tmp_path: Path, words: tuple[str, str], address: str) -> None:
    ran(words[0], str(base / "good"), words[1], address, code=2)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["s3://bucket/x", "s3:bucket/x", "s3//bucket/x", "file:///x", "$RUN/x"])
@pytest.mark.parametrize(
    "words",
    [
        ("export", "@good", "--torch"),
        ("export", "@good", "--hf", "out", "--files"),
        ("report", "@good", "-o"),
        ("keygen",),
        ("import", "@good", "@source"),
    ],
)
def test_an_address_in_place_of_a_local_path_is_refused(base: Path, tmp_path: Path, words: tuple[str, ...], address: str) -> None:
    command = [str(base / "good") if word == "@good" else word for word in words if word != "@source"]
    command.insert(1 if "@source" in words else len(command), address)
    before = sorted(base.glob("good/**/*"))
    refused = ran(*command, code=2)
    assert "give a path on this machine" in " ".join(refused.output.replace("│", " ").split())
    assert not any(tmp_path.iterdir())
    assert sorted(base.glob("good/**/*")) == before
