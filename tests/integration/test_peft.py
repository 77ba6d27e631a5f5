"""``raystow export`` of adapters of PEFT: the file is the one that PEFT writes, and PEFT loads it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster
from safetensors.torch import load_file

from integration.cli_runner import run_json
from integration.language_models import gpt2, llama

peft = pytest.importorskip("peft", reason="make test-frameworks installs PEFT in an environment of its own")

TOKENS = torch.arange(8)[None]
ADAPTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LoRA": (gpt2, {"target_modules": ["c_attn"]}),
    "DoRA": (gpt2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "biases": (gpt2, {"target_modules": ["c_attn"], "bias": "lora_only"}),
    "all biases": (gpt2, {"target_modules": ["c_attn"], "bias": "all", "lora_bias": True}),
    "an embedding": (gpt2, {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}),
    "an embedding of known name": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "a whole module": (llama, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "new tokens": (llama, {"target_modules": ["v_proj", "down_proj"], "trainable_token_indices": [1, 2, 3]}),
    "ranks": (llama, {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "use_rslora": True}),
}


def adapted(name: str) -> tuple[Any, Any]:
    """Return a base model, and a PEFT model of it, all of whose trainable parameters have changed."""
    make, options = ADAPTERS[name]
    base = make()
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return base, model.eval()


def exported(state: dict[str, Any], folder: Path, written: Path) -> Path:
    """Export a state with the config that PEFT has written; return the adapter's folder."""
    (written / "README.md").unlink(missing_ok=True)
    with LocalCluster(str(folder / "run")) as cluster:
        cluster.save({"model": state, "step": 1}, step=1)
    facts = run_json("export", folder / "run", "--hf", folder / "out", "--files", written, "--max-shard-size", "1kB")
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert facts["copied"] == ["adapter_config.json"]
    return folder / "out"


def same_file(folder: Path, other: Path) -> None:
    ours, theirs = load_file(folder / "adapter_model.safetensors"), load_file(other / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert json.loads((folder / "adapter_config.json").read_text()) == json.loads((other / "adapter_config.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_loads_an_exported_adapter(tmp_path: Path, name: str) -> None:
    """With the same logits as the saved model."""
    base, model = adapted(name)
    model.save_pretrained(tmp_path / "peft")
    out = exported(model.state_dict(), tmp_path, tmp_path / "peft")
    same_file(out, tmp_path / "peft")
    loaded = peft.PeftModel.from_pretrained(base, out).eval()
    with torch.no_grad():
        assert torch.equal(found := loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
        with loaded.disable_adapter():
            assert not torch.equal(found, loaded(input_ids=TOKENS).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", ["PEFT's names", "another adapter name", "trained parameters"])
def test_an_adapter_is_exported_from_each_kind_of_state(tmp_path: Path, saved: str) -> None:
    _, model = adapted("DoRA")
    model.save_pretrained(tmp_path / "peft")
    if saved == "PEFT's names":
        state = peft.get_peft_model_state_dict(model)
    elif saved == "trained parameters":
        state = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    else:
        state = {name.replace(".default", ".mine"): tensor for name, tensor in model.state_dict().items()}
    same_file(exported(state, tmp_path, tmp_path / "peft"), tmp_path / "peft")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_was_injected_is_exported(tmp_path: Path) -> None:
    """Without a PeftModel around the model, as Transformers does."""
    base, model = adapted("LoRA")
    model.save_pretrained(tmp_path / "peft")
    other = peft.inject_adapter_in_model(model.peft_config["default"], copy.deepcopy(base))
    peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(model))
    same_file(exported(other.state_dict(), tmp_path, tmp_path / "peft"), tmp_path / "peft")
