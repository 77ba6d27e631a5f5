"""``raystow export --hf`` refuses names that no model loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.cli_runner import ran, run_json
from integration.language_models import saved

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


@pytest.mark.parametrize("name", ["prompt_encoder.mask_embed.conv1.weight", "conv.parametrizations.weight.original0"])
def test_similar_names_of_models_of_transformers_are_exported(tmp_path: Path, name: str) -> None:
    """Such as those of SAM and Wav2Vec2."""
    folder = saved({"model": {"a": torch.ones(2), name: torch.ones(2)}}, tmp_path / "run")
    ran("export", folder, "--hf", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a", name}
