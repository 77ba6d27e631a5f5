"""``raystow export`` and ``raystow restore`` to object stores: what is there is read after a plain download."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import raystow
from integration.cli_runner import flip_byte, ran, run_json
from integration.language_models import config_folder, gpt2, same, saved, training_state
from raystow.orchestrator.export import version_files
from raystow.orchestrator.export.store_folder import MARKER
from raystow.storage.errors import StoreUnavailable
from raystow.storage.object_store import ObjectStore
from raystow.storage.stores import open_store


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A version of a GPT-2 training, and the model. The model's output layer is tied to its embedding."""
    model = gpt2()
    return saved(training_state(model), tmp_path_factory.mktemp("gpt2") / "run"), model


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.s3), "gs", "az"])
def address(request: pytest.FixtureRequest) -> str:
    """An empty address in each kind of object store."""
    return str(request.getfixturevalue(f"{request.param}_uri"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command makes a folder named like the address."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def downloaded(store: ObjectStore, folder: Path) -> Path:
    folder.mkdir()
    for one in store.list(""):
        (folder / one.key).write_bytes(store.get(one.key, max_bytes=1 << 30))
    return folder


def test_transformers_loads_what_was_exported(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    folder, model = run_folder
    words = ("export", folder, "--files", config_folder(model, tmp_path / "config"), "--max-shard-size", "20kB", "--hf")
    facts, local = run_json(*words, address), run_json(*words, tmp_path / "local")
    assert facts["path"] == address
    assert {**facts, "path": "", "seconds": 0} == {**local, "path": "", "seconds": 0}
    assert facts["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    out = downloaded(open_store(address), tmp_path / "out")
    assert os.listdir(tmp_path / "here") == []
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()
    }
    assert same(AutoModelForCausalLM.from_pretrained(out), model)
    assert AutoTokenizer.from_pretrained(out)("tiny model")["input_ids"] == [1, 2]


def test_dtypes_are_converted_as_in_a_folder(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    ran("export", run_folder[0], "--hf", address, "--dtype", "bfloat16")
    (file,) = downloaded(open_store(address), tmp_path / "out").iterdir()
    loaded, model = load_file(file), run_folder[1]
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())


def test_restore_writes_to_a_store(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    facts = run_json("restore", run_folder[0], "-o", address, "--max-file-size", "20kB")
    ran("restore", run_folder[0], "-o", tmp_path / "local", "--max-file-size", "20kB")
    assert facts["directory"] == address
    out = downloaded(open_store(address), tmp_path / "out")
    assert os.listdir(tmp_path / "here") == []
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()
    }


@pytest.mark.skipif(importlib.util.find_spec("fastsafetensors") is None, reason="fastsafetensors is not installed")
def test_fastsafetensors_loads_what_was_exported(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    from fastsafetensors import fastsafe_open

    ran("export", run_folder[0], "--hf", address)
    (file,) = downloaded(open_store(address), tmp_path / "out").iterdir()
    with fastsafe_open([str(file)], device="cpu", nogds=True) as opened:
        for name, tensor in run_folder[1].state_dict().items():
            assert torch.equal(opened.get_tensor(name), tensor)


def test_python_calls_write_the_same(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config")
    ran("export", folder, "--hf", tmp_path / "a", "--files", config, "--max-shard-size", "20kB")
    ran("restore", folder, "-o", tmp_path / "b", "--max-file-size", "20kB")
    model_at, all_at = f"{address}/model", f"{address}/all"
    assert raystow.export_model(folder, model_at, files=config, max_shard_size=20_000) == model_at
    assert raystow.export_version(raystow.latest(folder), all_at, max_file_size=20_000) == all_at  # type: ignore[arg-type]
    for made, expected in ((model_at, "a"), (all_at, "b")):
        found = downloaded(open_store(made), tmp_path / f"out-{expected}")
        assert {path.name: path.read_bytes() for path in found.iterdir()} == {
            path.name: path.read_bytes() for path in (tmp_path / expected).iterdir()
        }
    local = raystow.export_model(folder, tmp_path / "c", "step:7", dtype="bfloat16")
    assert load_file(Path(local) / "model.safetensors")["transformer.wte.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "wrong",
    [{"to": "hdfs://a/b"}, {"to": 3}, {"dtype": "int8"}, {"files": "s3://b/config"}, {"max_shard_size": 0}],
    ids=lambda wrong: str(*wrong),
)
def test_wrong_arguments_are_refused(run_folder: tuple[Path, Any], tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(raystow.StateError):
        raystow.export_model(run_folder[0], **{"to": tmp_path / "out", **wrong})
    assert not (tmp_path / "out").exists()


# Exports that do not end


_KILLED = """
import os, signal, sys
from raystow.cli import app
from raystow.orchestrator.export import version_files
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
version_files.write_index = killed
app.main()
"""


@pytest.mark.long
def test_a_killed_export_is_continued(run_folder: tuple[Path, Any], tmp_path: Path, address: str) -> None:
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config")
    words = ["export", str(folder), "--hf", address, "--max-shard-size", "20kB", "--files", str(config)]
    done = subprocess.run([sys.executable, "-c", _KILLED, *words], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = open_store(address)
    left = {one.key: one.modified for one in store.list("")}
    assert MARKER in left
    assert not left.keys() & {"model.safetensors.index.json", "config.json"}  # no library loads what is there
    shards = {name: changed for name, changed in left.items() if name.endswith(".safetensors")}
    assert len(shards) > 2
    ran(*words)
    now = {one.key: one.modified for one in store.list("")}
    assert MARKER not in now
    assert {name: now[name] for name in shards} == shards  # not written again
    assert same(AutoModelForCausalLM.from_pretrained(downloaded(store, tmp_path / "out")), model)


def test_a_part_of_another_export_is_refused(
    run_folder: tuple[Path, Any], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailable("the store is gone", subject=address)

    with monkeypatch.context() as patch:
        patch.setattr(version_files, "write_index", fail)
        ran("export", run_folder[0], "--hf", address, "--max-shard-size", "20kB", code=1)
    before = {one.key: one.modified for one in open_store(address).list("")}
    error = run_json("export", run_folder[0], "--hf", address, "--max-shard-size", "20kB", "--dtype", "float16", code=2)["error"]
    assert error["what"] == "has a part of another export"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    more = "--max-shard-size", "20kB", "--files", tmp_path / "files"  # files of both would be there
    error = run_json("export", run_folder[0], "--hf", address, *more, code=2)["error"]
    assert error["what"] == "has a part of another export"
    assert {one.key: one.modified for one in open_store(address).list("")} == before


def test_an_address_with_objects_is_refused(run_folder: tuple[Path, Any], address: str) -> None:
    open_store(address).put("config.json", [b"{}"])
    for words in (("export", run_folder[0], "--hf", address), ("restore", run_folder[0], "-o", address)):
        assert run_json(*words, code=2)["error"]["what"] == "is not an empty folder"
    assert [one.key for one in open_store(address).list("")] == ["config.json"]


def test_a_damaged_version_is_no_whole_object(tmp_path: Path, address: str) -> None:
    folder = saved({"model": {"w": torch.ones(1000)}}, tmp_path / "run")
    flip_byte(next(folder.glob("versions/*/weights-*.pack")))
    ran("export", folder, "--hf", address, code=3)
    assert [one.key for one in open_store(address).list("")] == [MARKER]
    assert json.loads(open_store(address).get(MARKER, max_bytes=1 << 12))["digest"]


@pytest.mark.parametrize("address", ["hdfs://a/b", "http://a/b", "s3:/b/x", "memory://x", "file:///x", "s3://"])
@pytest.mark.parametrize(
    "words",
    [("restore", "-o"), ("export", "--hf"), ("export", "--torch"), ("report", "-o"), ("keygen",)],
    ids=lambda words: " ".join(words),
)
def test_other_addresses_are_refused_by_name(
    run_folder: tuple[Path, Any], tmp_path: Path, words: tuple[str, ...], address: str
) -> None:
    repository = () if words[0] == "keygen" else (run_folder[0],)
    output = " ".join(ran(words[0], *repository, *words[1:], address, code=2, columns=300).output.split())
    assert address.partition(":")[0] in output
    assert "address" in output
    assert os.listdir(tmp_path / "here") == []
