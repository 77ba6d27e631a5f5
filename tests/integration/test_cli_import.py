"""``raystow import``: files of Hugging Face's tools and of ``raystow restore`` become versions."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster
from safetensors.torch import save_file

import raystow
from integration.cli_runner import run, run_json

TENSORS = {
    "model.embed": torch.randn(600, 100).bfloat16(),
    "model.bias": torch.randn(3_000_000),
    "model.none": torch.empty(0, 3),
    "model.scale": torch.tensor(1.5, dtype=torch.float64),
    "model.fp8": torch.randn(7, 3).to(torch.float8_e4m3fn),
    "optimizer.mask": torch.tensor([True, False, True]),
}


def check(version: raystow.Version | None, tensors: dict[str, torch.Tensor]) -> None:
    assert version is not None
    assert version.tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = version.read(name)
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert read.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_file_becomes_a_version(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    facts = run_json("import", tmp_path / "model.safetensors", tmp_path / "run", "--step", 40)
    repository = raystow.open(tmp_path / "run")
    (version,) = repository.versions()
    check(version, TENSORS)
    repository.verify(version)
    assert (facts["version"], facts["step"], facts["tensors"], facts["stored"]) == (1, 40, 6, version.bytes)
    assert facts["nbytes"] == version.raw
    into = {"model": {"embed": torch.zeros(600, 100, dtype=torch.bfloat16)}}
    raystow.restore_latest(str(tmp_path / "run"), into=into, strict=False)
    assert torch.equal(into["model"]["embed"], TENSORS["model.embed"])
    result = run("import", tmp_path, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("version 2 (step 41): 6 tensors, 11.6 MiB, stored in ")


def test_restored_files_can_be_imported(tmp_path: Path) -> None:
    """The files include several files with an index, and a dtype that safetensors lacks."""
    state = {**TENSORS, "z": torch.randn(4, dtype=torch.complex128), "wide": torch.randn(300_000)}
    with LocalCluster(str(tmp_path / "run")) as cluster:
        cluster.save(state, step=1)
    assert run("restore", tmp_path / "run", "--output", tmp_path / "out", "--max-file-size", "1MiB").exit_code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    run_json("import", tmp_path / "out", tmp_path / "again")
    check(raystow.open(tmp_path / "again").latest(), state)
    (index,) = (tmp_path / "out").glob("weights*.index.json")
    run_json("import", index, tmp_path / "weights")
    check(raystow.open(tmp_path / "weights").latest(), {k: v for k, v in state.items() if not k.startswith("optimizer")})


def header(fields: object, rest: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 40, "is not a safetensors file"),
        (header([]), "invalid header"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "do not fill the file"),
        (header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"), "invalid header"),
        (header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}), "invalid header"),
        (header({"a": {"dtype": "U8", "shape": [2**62, 4, 0], "data_offsets": [0, 0]}}), "invalid header"),
        (header({"a": {"dtype": "O", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"), "invalid header"),
        (
            header({n: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for n in "ab"}, b"12345678"),
            "do not fill the file",
        ),
    ],
    ids=["empty", "no header", "a list", "cut", "too small", "negative", "absurd", "objects", "overlapping"],
)
def test_an_invalid_safetensors_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    fields = run_json("import", tmp_path, tmp_path / "run", code=run("import", tmp_path, tmp_path / "run").exit_code)
    assert message in json.dumps(fields)
    assert "model.safetensors" in json.dumps(fields)
    assert not (tmp_path / "run").exists()


def test_a_step_that_no_version_can_have_is_refused_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    assert run("import", tmp_path, tmp_path / "run", "--step", 1 << 63).exit_code == 2
    assert not (tmp_path / "run").exists()
    assert run_json("import", tmp_path, tmp_path / "run", "--step", (1 << 63) - 1)["step"] == (1 << 63) - 1


def test_an_inconsistent_index_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    for where, message in (
        ({"b": "x.safetensors"}, "not in the file that the index names"),
        ({"a": "../x.safetensors"}, "is not an index"),
    ):
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        result = run("import", tmp_path / "m.safetensors.index.json", tmp_path / "run")
        assert result.exit_code != 0
        assert message in " ".join(result.output.split())
    (tmp_path / "m.safetensors.index.json").unlink()
    save_file({"a": torch.ones(2)}, tmp_path / "y.safetensors")
    assert "both have a tensor 'a'" in " ".join(run("import", tmp_path, tmp_path / "run").output.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
@pytest.mark.parametrize("index", [False, True], ids=["folder", "index"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, name: str, index: bool) -> None:
    folder, private = tmp_path / "model", tmp_path / name
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (folder / name).symlink_to(private)
    source = folder / (name if name.endswith("json") else "m.safetensors.index.json") if index else folder
    error = run_json("import", source, tmp_path / "run", code=2)["error"]
    led_out = source.name != name  # an index that is named itself may be anywhere, its files must be in the same folder
    assert ("leads out of its folder" in error["what"]) is led_out
    assert error["subject"] == str(folder / (name if led_out else "x.safetensors"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", ["", "x.safetensors", "x.safetensors.index.json"])
def test_a_pipe_is_not_read(tmp_path: Path, source: str) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / (source or "x.safetensors"))
    error = run_json("import", tmp_path / "model" / source, tmp_path / "run", code=2)["error"]
    assert error["what"] == "is not a regular file"


def test_a_hugging_face_cache_is_imported(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "01")
    (blobs / "02").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (snapshot / "x.safetensors").symlink_to("../../blobs/01")
    (snapshot / "m.safetensors.index.json").symlink_to("../../blobs/02")
    for source in (snapshot, snapshot / "m.safetensors.index.json", snapshot / "x.safetensors"):
        assert run_json("import", source, tmp_path / "run")["tensors"] == 1


def test_an_index_of_gigabytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "m.safetensors.index.json").open("wb") as file:
        file.truncate(8 << 30)
    error = run_json("import", tmp_path, tmp_path / "run", code=2)["error"]
    assert error["what"] == "has more than 32 MiB"
