"""Small language models, and repositories with a version of a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.local_cluster import LocalCluster
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

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
