"""``raystow keygen``, and the effect of its key on runs in a cluster and on commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray
from helpers.builders import whole, write

import raystow
from integration.cli_runner import run, run_json
from raystow.orchestrator.coordinator.ray_client import coordinator_actor
from raystow.storage.commit.committer import Committer
from raystow.storage.format import key_files, keys, records
from raystow.storage.format.key_files import SIGNING_KEY, TRUSTED_KEYS


def test_keygen_writes_a_key_pair_and_prints_its_settings(tmp_path: Path) -> None:
    key = tmp_path / "a key.pem"
    result = run("keygen", key)
    assert result.exit_code == 0, result.output
    assert key.stat().st_mode & 0o777 == 0o600
    secret = key.read_text().splitlines()[1]
    assert secret not in result.output
    shell = "\n".join(line for line in result.stdout.splitlines() if line.startswith("  export"))
    settings = subprocess.run(
        ["sh", "-c", f'{shell}\nprintf "%s\n" "${SIGNING_KEY}" "${TRUSTED_KEYS}"'], capture_output=True, text=True
    )
    assert settings.stdout.splitlines() == [str(key), f"{key}.pub"]


def test_help_has_an_example_and_fits_80_columns() -> None:
    result = run("keygen", "--help")
    assert "Example:  raystow keygen ~/" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_keygen_overwrites_no_file(tmp_path: Path) -> None:
    key, public = tmp_path / "key", tmp_path / "key.pub"
    run_json("keygen", key)
    before = key.read_bytes(), public.read_bytes()
    error = run_json("keygen", key, code=2)["error"]
    assert (error["kind"], error["subject"]) == ("StateError", str(key))
    assert (key.read_bytes(), public.read_bytes()) == before
    key.unlink()
    assert run_json("keygen", key, code=2)["error"]["subject"] == str(public)
    assert [path.name for path in tmp_path.iterdir()] == ["key.pub"]  # no private key without its public key


def test_an_unwritable_path_is_reported_with_a_remedy(tmp_path: Path) -> None:
    error = run_json("keygen", tmp_path / "no" / "key", code=1)["error"]
    assert error["subject"] == str(tmp_path / "no" / "key")
    assert error["remedy"]


def test_openssl_reads_the_key_files(tmp_path: Path) -> None:
    paths = run_json("keygen", tmp_path / "key")
    public = subprocess.run(["openssl", "pkey", "-in", paths["private"], "-pubout"], capture_output=True, text=True)
    if public.returncode:
        pytest.skip(f"this openssl cannot: {public.stderr}")
    assert public.stdout == Path(paths["public"]).read_text()


def save_one_array(uri: str) -> int:
    with raystow.Checkpointer(uri, rank=0, world_size=1) as checkpointer:
        return checkpointer.save({"w": np.arange(5.0)}, step=1, metrics={"loss": 0.5}).result(120).id


def restore_one_array(uri: str) -> int:
    with raystow.Checkpointer(uri, rank=0, world_size=1) as checkpointer:
        restored = checkpointer.restore_latest(into={"w": np.zeros(5)})
    return 0 if restored is None else restored.id


def in_cluster(uri: str, key: Path, job: Callable[[str], int] = save_one_array) -> int:
    """Save or restore once in a job with this signing key; return the version's id."""
    task = ray.remote(job).options(runtime_env={"env_vars": {SIGNING_KEY: str(key)}})
    try:
        id: int = ray.get(task.remote(uri), timeout=180)
    finally:
        ray.kill(coordinator_actor(uri))
    return id


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_only_holders_of_the_key_can_read_a_signed_run(tmp_path: Path) -> None:
    ours, theirs = run_json("keygen", tmp_path / "ours"), run_json("keygen", tmp_path / "theirs")
    uri = (tmp_path / "run").as_uri()
    assert in_cluster(uri, Path(ours["private"])) == 1
    assert run("verify", uri, "--deep", **{TRUSTED_KEYS: ours["public"]}).exit_code == 0
    version = raystow.open(uri, trusted_keys=ours["public"]).latest()
    assert version is not None
    assert (version.read("w") == np.arange(5.0)).all()

    other = {TRUSTED_KEYS: theirs["public"]}
    for words in (("show", uri), ("verify", uri), ("verify", uri, "--all"), ("restore", uri, "--output", tmp_path / "out")):
        error = run_json(*words, code=6, **other)["error"]
        assert error["kind"] == "Untrusted"
        assert ours["key"] in error["what"]
        assert theirs["key"] in error["what"]
    assert not (tmp_path / "out").exists()
    state = {"w": np.zeros(5)}
    os.environ[TRUSTED_KEYS] = theirs["public"]
    try:
        with pytest.raises(raystow.Untrusted):
            raystow.restore_latest(uri, into=state)
    finally:
        del os.environ[TRUSTED_KEYS]
    assert not state["w"].any()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_signing_run_refuses_a_forged_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = run_json("keygen", tmp_path / "ours"), run_json("keygen", tmp_path / "theirs")
    uri = (tmp_path / "run").as_uri()
    assert in_cluster(uri, Path(ours["private"])) == 1
    assert in_cluster(uri, Path(ours["private"]), restore_one_array) == 1
    with monkeypatch.context() as patch:
        patch.setenv(SIGNING_KEY, theirs["private"])
        signer = key_files.signer()
    assert signer is not None
    repository = raystow.open(uri)
    both = [key.raw.hex() for key in (signer.public, *repository.signed_by)]
    marker = {"repository": repository.id, "created": 0, "signed_by": both}
    repository.store.put(keys.MARKER, [records.dump(marker, keys.MARKER)])
    assert write(Committer(raystow.open(uri), "attacker", signer), {"w": whole(np.ones(5))}).id == 2
    with pytest.raises(raystow.Untrusted, match=theirs["key"]):
        in_cluster(uri, Path(ours["private"]), restore_one_array)


@pytest.mark.usefixtures("cluster")
def test_an_unusable_key_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    key = run_json("keygen", tmp_path / "key")["private"]
    Path(key).chmod(0o644)
    uri = (tmp_path / "run").as_uri()
    with pytest.raises(raystow.StateError, match="mode is 0644") as caught:
        in_cluster(uri, Path(key))
    assert Path(key).read_text().splitlines()[1] not in str(caught.value)
    assert not (tmp_path / "run").exists()
