"""``raystow export`` of LoRA adapters, without PEFT. ``test_peft`` compares the files with those of PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.cli_runner import ran, run_json
from integration.language_models import saved

LAYER = "h.0.c_attn"
ADAPTER = {
    f"{LAYER}.lora_A.default.weight": f"{LAYER}.lora_A.weight",
    f"{LAYER}.lora_B.default.bias": f"{LAYER}.lora_B.bias",
    f"{LAYER}.lora_magnitude_vector.default.weight": f"{LAYER}.lora_magnitude_vector",
    f"{LAYER}.base_layer.bias": f"{LAYER}.base_layer.bias",
    "wte.lora_embedding_A.default": "wte.lora_embedding_A",
    "wpe.token_adapter.trainable_tokens_delta.default": "wpe.token_adapter.trainable_tokens_delta",
    "lm_head.lora_A.default.weight": "lm_head.lora_A.weight",
    "lm_head.base_layer.weight": "lm_head.base_layer.weight",
    "score.modules_to_save.default.weight": "score.weight",
}
"""The names of a LoRA adapter in the state of a PEFT model and in PEFT's files."""
BASE = [
    *(f"{LAYER}.base_layer.weight", "wte.base_layer.weight", "ln.bias", "score.original_module.weight"),
    *("h.0.default.weight", "h.0.mixer.lora_A.weight"),  # the base model's own
]


@pytest.mark.parametrize("top", ["base_model.model.", ""], ids=["PeftModel", "injected"])
def test_an_adapter_is_written_by_the_names_of_peft(tmp_path: Path, top: str) -> None:
    names = [*ADAPTER, *BASE]
    folder = saved(
        {"model": {f"{top}{name}": torch.tensor(float(number)) for number, name in enumerate(names)}}, tmp_path / "run"
    )
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "lora_only"}')
    ran("export", folder, "--hf", tmp_path / "out", "--files", tmp_path / "config", "--max-shard-size", "1B")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    found = {name: int(tensor) for name, tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").items()}
    assert found == {f"base_model.model.{name}": names.index(of) for of, name in ADAPTER.items()}


@pytest.mark.parametrize(
    ("config", "names", "what"),
    [
        ('{"peft_type": "IA3"}', ["base_model.model.c.lora_A.default.weight"], "is of an adapter of type 'IA3', not LORA"),
        ('["LORA"]', ["base_model.model.c.lora_A.default.weight"], "is not a JSON object"),
        ('{"peft_type": "LORA"}', ["w"], "the state has 0 adapters"),
        ('{"peft_type": "LORA"}', ["c.lora_A.one.weight", "c.lora_A.two.weight"], "the state has 2 adapters: one, two"),
        ('{"peft_type": "LORA"}', ["net.base_model.model.c.lora_A.a.weight"], "is the name of a PEFT model within another one"),
        (
            '{"peft_type": "LORA"}',
            ["h._orig_mod.c.lora_A.a.weight"],
            "is a name of a wrapped module, which from_pretrained does not load",
        ),
    ],
    ids=["another method", "no settings", "no adapter", "two adapters", "part of a model", "wrapped"],
)
def test_adapters_that_peft_would_not_write_are_refused(tmp_path: Path, config: str, names: list[str], what: str) -> None:
    folder = saved({"model": {name: torch.ones(2) for name in names}}, tmp_path / "run")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "adapter_config.json").write_text(config)
    error = run_json("export", folder, "--hf", tmp_path / "out", "--files", tmp_path / "config", code=2)["error"]
    assert error["what"] == what
    assert not (tmp_path / "out").exists()
