"""``raystow export``: folders that Transformers loads, files that torch loads, and uploads to a stub of the Hub."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hub_server import TOKEN, Hub, hub_server
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from integration.cli_runner import flip_byte, ran, run_json
from integration.language_models import config_folder, gpt2, llama, same, saved, training_state
from raystow.orchestrator.export import version_files
from raystow.state.tree import flatten
from raystow.storage.errors import Damaged


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A version of a GPT-2 training, and the model. The model's output layer is tied to its embedding."""
    model = gpt2()
    return saved(training_state(model), tmp_path_factory.mktemp("gpt2") / "run"), model


def test_transformers_loads_the_folder(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = run_folder
    facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config_folder(model, tmp_path / "config"))
    copied = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert (facts["prefix"], facts["copied"], facts["commit"]) == ("model.", copied, None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*copied, "model.safetensors"])
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert same(loaded, model)
    assert not any(report.values()), report
    assert same(AutoModel.from_pretrained(tmp_path / "out"), model.transformer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("tiny model")["input_ids"] == [1, 2]


def test_tied_weights_are_written_once(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = run_folder
    facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config_folder(model, tmp_path / "config"))
    assert facts["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys() - {"lm_head.weight"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": None},
        {"architectures": ["pipeline"]},
        {"architectures": ["MyGPT"]},
        {"model_type": "mine"},
        {"n_head": 0},
    ],
    ids=["no class", "no model", "own class", "own type", "invalid"],
)
def test_all_names_are_written_for_unknown_models(
    run_folder: tuple[Path, Any], tmp_path: Path, change: dict[str, object]
) -> None:
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config.parent)
    assert (facts["tied"], facts["files"][0]["tensors"]) == ({}, len(model.state_dict()))


def test_all_names_are_written_without_transformers(
    run_folder: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers also loads and ties the weights of such a folder."""
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config)
    assert (facts["tied"], facts["files"][0]["tensors"]) == ({}, len(model.state_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(loaded, model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_tied_names_with_other_bytes_are_written(tmp_path: Path) -> None:
    model = gpt2()
    weights = {**model.state_dict(), "lm_head.weight": torch.zeros(96, 32)}
    words = ("--hf", tmp_path / "out", "--files", config_folder(model, tmp_path / "config"))
    facts = run_json("export", saved({"model": weights}, tmp_path / "run"), *words)
    assert (facts["tied"], facts["files"][0]["tensors"]) == ({}, len(weights))


def test_untied_models_keep_equal_weights(tmp_path: Path) -> None:
    """The layer norms of a new model are all ones: equal, but not tied."""
    model = llama()
    folder = saved({"model": model.state_dict(), "ints": torch.arange(5)}, tmp_path / "run")
    facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config_folder(model, tmp_path / "config"))
    assert (facts["prefix"], facts["tied"]) == ("model.", {})
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_large_models_are_sharded(run_folder: tuple[Path, Any], tmp_path: Path, small_slabs: None) -> None:
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config")
    facts = run_json("export", folder, "--hf", tmp_path / "out", "--files", config, "--max-shard-size", "20kB")
    names, total = [file["name"] for file in facts["files"]], len(facts["files"])
    assert total > 2
    assert names == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    assert all(file["nbytes"] <= 20_000 for file in facts["files"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(file["nbytes"] for file in facts["files"])
    assert {name: file for file in names for name in load_file(tmp_path / "out" / file)} == index["weight_map"]
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_are_converted(run_folder: tuple[Path, Any], tmp_path: Path, dtype: str) -> None:
    """The values equal torch's conversion, and config.json names the dtype, so Transformers loads the model with it."""
    folder, model = run_folder
    config = config_folder(model, tmp_path / "config")
    ran("export", folder, "--hf", tmp_path / "out", "--files", config, "--dtype", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is getattr(torch, dtype)
    assert same(loaded, copy.deepcopy(model).to(getattr(torch, dtype)))
    assert json.loads((config / "config.json").read_text())["dtype"] == "float32"


def test_only_floats_of_16_bits_and_more_are_converted(tmp_path: Path) -> None:
    weights = {
        "w": torch.randn(3, 5).double(),
        "half": torch.randn(3).half(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "ids": torch.arange(3),
        "scalar": torch.tensor(float("inf")),
        "none": torch.empty(0, 2),
    }
    folder = saved({"model": weights}, tmp_path / "run")
    ran("export", folder, "--hf", tmp_path / "out", "--dtype", "bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    converted = {name: w.bfloat16() if name not in ("fp8", "ids") else w for name, w in weights.items()}
    assert found.keys() == converted.keys()
    for name, tensor in converted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double()), name


def test_a_number_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    folder = saved({"model": {"w": torch.tensor([1.0, 1e38]).bfloat16()}}, tmp_path / "run")
    error = run_json("export", folder, "--hf", tmp_path / "out", "--dtype", "float16", code=2)["error"]
    assert (error["subject"], error["what"]) == ("model.w", "has a number too large for float16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# prefixes


def test_several_mappings_need_a_prefix(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(500)}, "ema": {"w": torch.ones(1000)}, "optim": {"exp_avg": {"w": torch.ones(9)}}}
    folder = saved(state, tmp_path / "run")
    error = run_json("export", folder, "--hf", tmp_path / "out", code=2)["error"]
    assert error["what"] == "2 mappings have weights: '' (5.86 KiB), 'ema.' (3.91 KiB), 'model.' (1.95 KiB)"
    error = run_json("export", folder, "--hf", tmp_path / "out", "--prefix", "models.", code=2)["error"]
    assert error["what"].startswith("no tensor has the prefix 'models.'; prefixes with weights: '' (5.86 KiB)")
    ran("export", folder, "--hf", tmp_path / "out", "--prefix", "ema.")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.ones(1000))


@pytest.mark.parametrize(
    ("state", "prefix", "names"),
    [
        ({"w": torch.ones(2), "opt.lr": torch.ones(1)}, "", {"w"}),
        (
            {"app": {"model": {"opt.w": torch.ones(2), "b": torch.ones(1)}, "optim": {"w": torch.ones(2)}}},
            "app.model.",
            {"opt.w", "b"},
        ),
        ({"model": {"module.a.w": torch.ones(2), "module.b": torch.arange(2)}}, "model.module.", {"a.w", "b"}),
        ({"model": {"_orig_mod.module.w": torch.ones(2)}}, "model._orig_mod.module.", {"w"}),
        ({"model": {"module.w": torch.ones(2), "head": torch.ones(2)}}, "model.", {"module.w", "head"}),
        ({"model": {"w": np.ones(2, np.float32)}, "seen": torch.arange(4)}, "model.", {"w"}),
    ],
    ids=["flat", "nested", "DDP", "compiled", "module of the model", "arrays"],
)
def test_the_prefix_is_found(tmp_path: Path, state: dict[str, Any], prefix: str, names: set[str]) -> None:
    facts = run_json("export", saved(state, tmp_path / "run"), "--hf", tmp_path / "out")
    assert facts["prefix"] == prefix
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_a_state_without_weights_is_refused(tmp_path: Path) -> None:
    folder = saved({"optim": {"exp_avg": torch.ones(2)}, "seen": torch.arange(4)}, tmp_path / "run")
    assert run_json("export", folder, "--hf", tmp_path / "out", code=2)["error"]["what"] == "0 mappings have weights"


def test_dtypes_that_safetensors_lacks_are_refused(tmp_path: Path) -> None:
    folder = saved({"model": {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}}, tmp_path / "run")
    error = run_json("export", folder, "--hf", tmp_path / "out", code=2)["error"]
    assert (error["subject"], error["what"]) == ("model.c", "safetensors has no complex128")


# Failed exports


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (Damaged("x", subject="y"), 3)])
def test_a_failed_export_leaves_no_files(
    run_folder: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int
) -> None:
    def write_index_and_stop(write: object, parts: object) -> None:
        assert len(list((tmp_path / "a").glob("*/*/*"))) > 2  # all tensor files are written
        raise stop

    monkeypatch.setattr(version_files, "write_index", write_index_and_stop)
    ran("export", run_folder[0], "--hf", tmp_path / "a" / "out", "--max-shard-size", "20kB", code=code)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from raystow.cli import app
from raystow.orchestrator.export import version_files
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
version_files.write_index = killed
app.main()
"""


def test_a_killed_export_leaves_no_output_folder(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    words = ["export", str(run_folder[0]), "--hf", str(tmp_path / "out"), "--max-shard-size", "20kB"]
    done = subprocess.run([sys.executable, "-c", _KILLED, *words], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.raystow-")
    ran(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_is_complete_is_not_written_again(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    """Nobody may know of it: its process may have been killed after the last file."""
    files, out = config_folder(run_folder[1], tmp_path / "config"), tmp_path / "out"
    words = ("export", run_folder[0], "--hf", out, "--files", files, "--max-shard-size", "20kB")
    ran(*words)

    def written() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}

    before = written()
    ran(*words)
    assert written() == before
    assert run_json(*words, "--dtype", "bfloat16", code=2)["error"]["what"] == "is not an empty folder"
    (files / "config.json").write_text((files / "config.json").read_text().replace("gpt2", "gpt3"))
    assert run_json(*words, code=2)["error"]["what"] == "is not an empty folder"


@pytest.mark.parametrize(
    ("content", "what"), [(None, "is not a folder"), ("[1", "is not a JSON object"), ("3", "is not a JSON object")]
)
def test_an_unreadable_config_is_refused(run_folder: tuple[Path, Any], tmp_path: Path, content: str | None, what: str) -> None:
    config = tmp_path / "config"
    if content is not None:
        config.mkdir()
        (config / "config.json").write_text(content)
    words = ("export", run_folder[0], "--hf", tmp_path / "out", "--files", config, "--dtype", "bfloat16")
    error = run_json(*words, code=2)["error"]
    assert error["what"] == what
    assert error["subject"].startswith(str(config))
    assert not (tmp_path / "out").exists()


def test_a_damaged_version_is_not_exported(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run_folder[0], tmp_path / "run"))
    flip_byte(next(folder.glob("versions/*/weights-*.pack")))
    ran("export", folder, "--hf", tmp_path / "out", code=3)
    ran("export", folder, "--torch", tmp_path / "state.pt", code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "words",
    [(), ("--hf", "a", "--torch", "b"), ("--torch", "b", "--dtype", "float16"), ("--hf", "a", "--dtype", "int8")],
    ids=["neither", "both", "dtype of a torch file", "integers"],
)
def test_invalid_option_combinations_are_usage_errors(run_folder: tuple[Path, Any], words: tuple[str, ...]) -> None:
    assert "Usage:" in ran("export", run_folder[0], *words, code=2).stderr


# the Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


def push(hub: Hub, folder: Path, to: Path, *words: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Export and push in a separate process, because the client reads its settings at import."""
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(to.parent / "home"),
    }
    program = [sys.executable, "-m", "raystow", "export", str(folder), "--hf", str(to), "--push", "org/tiny", *map(str, words)]
    return subprocess.run(program, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)


def test_the_folder_is_pushed(run_folder: tuple[Path, Any], tmp_path: Path, hub: Hub) -> None:
    """Older weight files are deleted: Transformers would load model.safetensors instead of the numbered files."""
    folder, model = run_folder
    hub.files = {
        ".gitattributes": b"",
        "README.md": b"mine",
        "model.safetensors": b"old",
        "model-00009-of-00009.safetensors": b"old",
    }
    done = push(hub, folder, tmp_path / "out", "--files", config_folder(model, tmp_path / "config"), "--max-shard-size", "20kB")
    assert done.returncode == 0, done.stderr
    others = {".gitattributes": b"", "README.md": b"mine"}
    assert hub.files == others | {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors.index.json"} < hub.files.keys()
    assert hub.messages == ["raystow version 1, step 7"]
    assert [(one["name"], one["organization"], one["visibility"]) for one in hub.created] == [("tiny", "org", "private")]
    assert f"uploaded: {hub.endpoint}/org/tiny/commit/1" in done.stdout


def test_a_push_without_a_valid_token_writes_nothing(run_folder: tuple[Path, Any], tmp_path: Path, hub: Hub) -> None:
    done = push(hub, run_folder[0], tmp_path / "out", token="hf_wrong")
    assert done.returncode == 1
    assert "error: org/tiny: " in done.stderr
    assert "HF_TOKEN" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_failed_push_leaves_the_folder(run_folder: tuple[Path, Any], tmp_path: Path, hub: Hub) -> None:
    hub.commits = False
    """And what would have been published was listed before."""
    done = push(hub, run_folder[0], tmp_path / "out", "--files", config_folder(run_folder[1], tmp_path / "config"))
    assert done.returncode == 1
    assert "Storage limit reached" in done.stderr
    listed = "uploads to org/tiny: config.json, model.safetensors, tokenizer.json, tokenizer_config.json\n"
    assert done.stderr.index(listed) < done.stderr.index("Storage limit reached")
    assert f"`hf upload org/tiny {tmp_path / 'out'}` uploads it" in done.stderr
    assert "model.safetensors" in [path.name for path in (tmp_path / "out").iterdir()]


def test_a_push_without_the_hub_client_is_refused(
    run_folder: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = run_json("export", run_folder[0], "--hf", tmp_path / "out", "--push", "org/tiny", code=1)["error"]
    assert (error["kind"], error["remedy"]) == ("Unsupported", "pip install huggingface_hub")
    assert not (tmp_path / "out").exists()


# torch


def test_torch_loads_the_state(tmp_path: Path) -> None:
    """The default ``weights_only=True`` of torch suffices."""
    state = {
        **training_state(gpt2()),
        "numpy": {"array": np.arange(6).reshape(2, 3), "scalar": np.float32(1.5)},
        "plain": [1, (2.5, "text", None), {"deep": b"bytes"}, {}, True, 2**80],
        3: torch.ones(2, dtype=torch.bfloat16),
    }
    facts = run_json("export", saved(state, tmp_path / "run"), "--torch", tmp_path / "new" / "state.pt")
    assert facts["path"] == str(tmp_path / "new" / "state.pt")
    assert [file["name"] for file in facts["files"]] == ["state.pt"]
    expected = {**state, "numpy": {"array": torch.arange(6).reshape(2, 3), "scalar": torch.tensor(1.5)}}
    loaded = torch.load(tmp_path / "new" / "state.pt")  # noqa: TID251
    found, leaves = ({leaf.path: leaf.value for leaf in flatten(one)} for one in (loaded, expected))
    assert found.keys() == leaves.keys()
    for path, leaf in leaves.items():
        equal = torch.equal(found[path], leaf) if isinstance(leaf, torch.Tensor) else found[path] == leaf
        assert equal, path
        assert type(found[path]) is torch.Tensor or not isinstance(leaf, torch.Tensor)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["state.pt"]
    error = run_json("export", tmp_path / "run", "--torch", tmp_path / "new" / "state.pt", code=2)["error"]
    assert error["what"] == "exists"
