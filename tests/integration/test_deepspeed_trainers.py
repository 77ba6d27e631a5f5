"""DeepSpeed under Accelerate and under Hugging Face's Trainer: a resumed training has the same losses, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import raystow
from raystow.storage.errors import StateError

pytest.importorskip("deepspeed", reason="make test-frameworks installs DeepSpeed in an environment of its own")

from integration.deepspeed_ranks import PATIENCE, Net, config, new_ranks

BATCH = 2


def begin(rank: int, n: int, address: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_DEEPSPEED="true")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def accelerated(rank: int, n: int, address: str, uri: str, folder: str, steps: int) -> list[str]:
    """Train with Accelerate to ``steps``, save after each step, and resume from the folder if it exists; return the losses."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    begin(rank, n, address)
    torch.manual_seed(1)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_without_schedule(2)))
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    with raystow.deepspeed.attach(engine, uri):
        if os.path.exists(folder):
            accelerator.load_state(f"{folder}/checkpoint_{len(os.listdir(folder)) - 1}")
        while engine.global_steps < steps:
            data = torch.Generator().manual_seed(10 * engine.global_steps + rank)
            loss = engine(torch.randn(BATCH, 13, generator=data))
            accelerator.backward(loss)
            losses.append(loss.item().hex())
            accelerator.save_state(f"{folder}/checkpoint_{engine.global_steps - 1}")
    ray.shutdown()
    return losses


def _without_schedule(stage: int) -> dict[str, Any]:
    settings = config(stage, "bf16")
    del settings["scheduler"], settings["optimizer"]
    return {**settings, "gradient_accumulation_steps": 1}


def test_accelerate_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    def trained(name: str, steps: int) -> list[list[str]]:
        with new_ranks(tmp_path / f"{name}{steps}") as ranks:
            there = cluster.address, str(tmp_path / name), str(tmp_path / f"{name}-folder")
            return ranks.call(2, accelerated, *there, steps, timeout=PATIENCE)

    whole, first, second = trained("whole", 4), trained("halved", 2), trained("halved", 4)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def with_trainer(rank: int, n: int, address: str, uri: str, folder: str, steps: int) -> dict[str, str]:
    """Train with the Trainer to ``steps``, and resume if a version exists; return the losses that the Trainer logged."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    begin(rank, n, address)
    torch.manual_seed(1)
    shape = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=16, attn_pdrop=0.0)
    data = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (40, 8), generator=torch.Generator().manual_seed(2))
    ]
    settings = {**config(3, "fp32"), "train_micro_batch_size_per_gpu": "auto"}
    del settings["scheduler"], settings["optimizer"]
    arguments = TrainingArguments(
        folder,
        deepspeed=settings,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        disable_tqdm=True,
    )
    with raystow.Checkpointer(uri) as checkpointer:
        checkpointing = raystow.huggingface.Checkpointing(checkpointer, every_n_steps=2)
        trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=data, callbacks=[checkpointing])
        trainer.train(resume_from_checkpoint=checkpointing.resume(trainer))
    ray.shutdown()
    return {str(log["step"]): repr((log["loss"], log["learning_rate"])) for log in trainer.state.log_history if "loss" in log}


def test_the_trainer_resumes_deepspeed_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    def trained(name: str, steps: int) -> dict[str, str]:
        with new_ranks(tmp_path / f"{name}{steps}") as ranks:
            there = cluster.address, str(tmp_path / name), str(tmp_path / f"{name}-folder")
            return ranks.call(2, with_trainer, *there, steps, timeout=PATIENCE)[0]

    whole, first, second = trained("whole", 6), trained("halved", 4), trained("halved", 6)
    assert {**first, **second} == whole
    versions = [raystow.open(tmp_path / name).versions() for name in ("whole", "halved")]
    assert [[version.step for version in of] for of in versions] == [[2, 4, 6], [2, 4, 6]]
    for name in versions[0][-1].tensors():
        assert torch.equal(versions[0][-1].read(name), versions[1][-1].read(name)), name


def test_trainer_and_engine_restore_the_same_version() -> None:
    """Not so if only the tensors of the newest version are damaged: the engine takes the one before."""
    from raystow.integrations.deepspeed.trainer import TrainerEngine

    class Run:
        uri = "s3://bucket/run"

        def restore(self, into: dict[str, Any], version: Any, allow_unused: str) -> Any:
            return SimpleNamespace(id=6)

    trainer = SimpleNamespace(accelerator=SimpleNamespace(prepare=None))
    engine = TrainerEngine(trainer, Run(), "latest")
    assert engine.restore({}) == SimpleNamespace(id=6)
    engine.attached = SimpleNamespace(restore=lambda version: (SimpleNamespace(id=6), {}))
    assert engine.load() == (Run.uri, {})
    engine.attached = SimpleNamespace(restore=lambda version: (SimpleNamespace(id=5), {}))
    with pytest.raises(StateError, match=r"progress of version 6.*call resume\(trainer, 5\)"):
        engine.load()
