"""``raystow export --hf`` by names: adapters as PEFT writes them, and names that no model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import ran, run_json
from local_cluster import LocalCluster
from safetensors.torch import load_file


def saved(state: dict[str, Any], folder: Path) -> Path:
    with LocalCluster(str(folder)) as cluster:
        cluster.save(state, step=7)
    return folder


PEFT = "base_model.model.transformer.h.0.attn.c_attn"


@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        (f"{PEFT}.lora_A.default.weight", "name of PEFT", "adapter_config.json"),  # the state of a PeftModel
        (f"{PEFT}.lora_B.weight", "name of PEFT", "merge_and_unload"),  # get_peft_model_state_dict
        ("transformer.h.0.attn.c_attn.base_layer.weight", "name of PEFT", "--files"),  # injected into a model
        ("base_model.model.score.modules_to_save.default.weight", "name of PEFT", "--keep-names"),
        ("prompt_encoder.default.embedding.weight", "name of PEFT", "merge_and_unload"),
        ("transformer.h.0._orig_mod.attn.weight", "name of a wrapped module", "wrapped"),
        ("transformer.h.0._checkpoint_wrapped_module.attn.weight", "name of a wrapped module", "wrapped"),
        ("transformer._fsdp_wrapped_module.wte.weight", "name of a wrapped module", "--keep-names"),
    ],
)
@pytest.mark.parametrize("prefix", [(), ("--prefix", "model.")], ids=["found", "given"])
def test_names_that_no_model_loads_are_refused(
    tmp_path: Path, name: str, what: str, remedy: str, prefix: tuple[str, ...]
) -> None:
    """``from_pretrained`` would report missing keys as a warning, and begin with random weights."""
    folder = saved({"model": {"transformer.wte.weight": torch.ones(2), name: torch.ones(2)}}, tmp_path / "run")
    error = run_json("export", folder, "--hf", tmp_path / "out", *prefix, code=2)["error"]
    assert what in error["what"]
    assert error["subject"] == f"model.{name}"
    assert remedy in error["remedy"]
    assert not (tmp_path / "out").exists()
    ran("export", folder, "--hf", tmp_path / "out", *prefix, "--keep-names")  # a model's own code may have such names
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"transformer.wte.weight", name}


@pytest.mark.parametrize(
    ("saved_name", "name"),
    [
        ("h.0.c_attn.lora_A.default.weight", "h.0.c_attn.lora_A.weight"),
        ("h.0.c_attn.lora_B.default.bias", "h.0.c_attn.lora_B.bias"),
        ("h.0.c_attn.lora_magnitude_vector.default.weight", "h.0.c_attn.lora_magnitude_vector"),
        ("h.0.c_attn.lora_embedding_A.default", "h.0.c_attn.lora_embedding_A"),
        ("score.modules_to_save.default.weight", "score.weight"),
        ("wte.token_adapter.trainable_tokens_delta.default", "wte.token_adapter.trainable_tokens_delta"),
        ("h.0.c_attn.base_layer.bias", "h.0.c_attn.base_layer.bias"),
        ("lm_head.base_layer.weight", "lm_head.base_layer.weight"),
        ("h.0.c_attn.base_layer.weight", None),
        ("score.original_module.weight", None),
        ("h.0.mixer.lora_A.weight", None),  # of the base model
        ("h.0.default.weight", None),
    ],
)
@pytest.mark.parametrize("top", ["base_model.model.", ""], ids=["PeftModel", "injected"])
def test_an_adapter_is_written_by_the_names_of_peft(tmp_path: Path, saved_name: str, name: str | None, top: str) -> None:
    layers = ["h.0.c_attn", "lm_head"]
    names = {f"{layer}.{part}" for layer in layers for part in ("base_layer.weight", "lora_A.default.weight")} | {saved_name}
    folder = saved({"model": {f"{top}{one}": torch.full((2,), float(len(one))) for one in names}}, tmp_path / "run")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "lora_only"}')
    ran("export", folder, "--hf", tmp_path / "out", "--files", tmp_path / "config", "--max-shard-size", "1B")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    always = {"h.0.c_attn.lora_A.weight", "lm_head.lora_A.weight", "lm_head.base_layer.weight"}
    assert found.keys() == {f"base_model.model.{one}" for one in always | ({name} if name is not None else set())}
    if name is not None:
        assert found[f"base_model.model.{name}"].tolist() == [float(len(saved_name))] * 2


@pytest.mark.parametrize(
    ("config", "names", "what"),
    [
        ('{"peft_type": "IA3"}', ["base_model.model.c.lora_A.default.weight"], "is of an adapter of type 'IA3', not LORA"),
        ('["LORA"]', ["base_model.model.c.lora_A.default.weight"], "is not a JSON object"),
        ('{"peft_type": "LORA"}', ["w"], "the state has 0 adapters"),
        ('{"peft_type": "LORA"}', ["c.lora_A.one.weight", "c.lora_A.two.weight"], "the state has 2 adapters: one, two"),
        ('{"peft_type": "LORA"}', ["net.base_model.model.c.lora_A.a.weight"], "is the name of a PEFT model within another one"),
    ],
    ids=["another method", "no settings", "no adapter", "two adapters", "part of a model"],
)
def test_adapters_that_peft_would_not_write_are_refused(tmp_path: Path, config: str, names: list[str], what: str) -> None:
    folder = saved({"model": {name: torch.ones(2) for name in names}}, tmp_path / "run")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "adapter_config.json").write_text(config)
    error = run_json("export", folder, "--hf", tmp_path / "out", "--files", tmp_path / "config", code=2)["error"]
    assert error["what"] == what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["prompt_encoder.mask_embed.conv1.weight", "conv.parametrizations.weight.original0"])
def test_similar_names_of_models_of_transformers_are_exported(tmp_path: Path, name: str) -> None:
    """Such as those of SAM and Wav2Vec2."""
    folder = saved({"model": {"a": torch.ones(2), name: torch.ones(2)}}, tmp_path / "run")
    ran("export", folder, "--hf", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a", name}
