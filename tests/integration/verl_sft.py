"""verl's trainer of supervised fine-tuning with a small Llama on CPUs. It records the prompts that it trains, and can be
killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from helpers.polling import wait_until
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, models
from torch import distributed
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.trainer import sft_trainer

import raystow
from integration import verl_cpu
from integration.gloo import die
from raystow.integrations.verl.settings import VARIABLE
from raystow.integrations.verl.training_process import PROCESS

assert verl_cpu
sys.path.append(str(Path(__file__).parents[2] / "examples"))  # verl imports verl_checkpoints from this folder

PROMPTS, BATCH = 32, 4


class Prompts(Dataset):
    """Short sequences of different lengths. ``train_files`` is the file in which prompts are recorded."""

    def __init__(self, parquet_files: str, **_: Any) -> None:
        self._notes = Path(parquet_files)

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        with self._notes.open("a") as notes:
            notes.write(f"{i}\n")
        ids = torch.arange(i, i + 4 + i % 3) % 60
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.ones_like(ids),
        }


def make_model(folder: Path) -> None:
    """Write a model and its tokenizer to the folder that becomes ``model.path``."""
    words = {str(i): i for i in range(62)} | {"<unk>": 62, "<eos>": 63}
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<eos>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **special).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings=False, **size)).save_pretrained(
        folder
    )


def latest_step(uri: str) -> int:
    """Return the step of the newest version, or 0 if there is none."""
    try:
        version = raystow.latest(uri)
    except raystow.NotARepository:
        return 0
    return 0 if version is None else version.step


def fine_tune(rank: int, n: int, address: str, uri: str, folder: Path, steps: int, dies_after: int = 0, *overrides: str) -> None:
    """Run verl's trainer up to a step.

    ``folder`` has ``model``, and gets the trainer's ``default_local_dir`` and the records of each rank. ``dies_after``: the step
    after which all ranks are killed, once a version exists.
    """
    place = {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({VARIABLE: uri, "VERL_ENGINE_DEVICE": "cpu", **place})
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    own = [
        f"data.train_files={folder}/notes-{rank}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"model.path={folder}/model",
    ]
    model = [
        "model.external_lib=raystow.verl",
        "+model.override_config.attn_implementation=eager",
        "model.use_remove_padding=false",
    ]
    engine = [
        "engine.strategy=fsdp2",
        "engine.use_torch_compile=false",
        "model.enable_gradient_checkpointing=false",
        "optim.lr=1e-3",
    ]
    batches = [
        f"data.train_batch_size={BATCH}",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=false",
        "data.num_workers=0",
    ]
    data = [f"data.custom_cls.path={__file__}", "data.custom_cls.name=Prompts"]
    run = [f"trainer.total_training_steps={steps}", "trainer.device=cpu", "trainer.logger=[]", "trainer.save_freq=2"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", [*own, *model, *engine, *batches, *data, *run, *overrides])
    trainer = sft_trainer.SFTTrainer(config)
    if dies_after:
        train = trainer.training_client.train_batch

        def train_and_die(data: Any) -> Any:
            if trainer.engine.lr_scheduler.last_epoch == dies_after:
                wait_until(lambda: latest_step(uri), "a version")
                distributed.barrier()
                die()
            return train(data)

        trainer.training_client.train_batch = train_and_die
    trainer.fit()
    PROCESS.close()  # as at the end of a process
