"""Small language models, and repositories with a version of a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.local_cluster import LocalCluster
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

SIZES = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, **SIZES))


def llama() -> Any:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, **SIZES}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))


def saved(state: dict[str, Any], folder: Path) -> Path:
    with LocalCluster(str(folder)) as cluster:
        cluster.save(state, step=7)
    return folder


def training_state(model: Any) -> dict[str, Any]:
    """Return a training state: weights, optimizer, random state and step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 7,
    }


def config_folder(model: Any, folder: Path) -> Path:
    """Write a model folder with a config, a tokenizer, and files that an export must not copy; return its path."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "tiny": 1, "model": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    for name in ("model.safetensors", "model.safetensors.index.json", ".env", "optimizer.pt"):
        (folder / name).write_text("not this one")
    return folder


def same(a: Any, b: Any) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
