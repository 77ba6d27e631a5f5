"""Train with Hugging Face's Trainer and Ray Train on two CPU workers, and resume from checkpoints.

    python examples/ray_train_huggingface.py FOLDER [STEPS]

``FOLDER``: the storage path of Ray Train, which also contains the repository: ``s3://bucket/prefix`` or a folder that all nodes
share. To continue a run, start it again with more ``STEPS``. Needs ``pip install transformers accelerate``.
"""

import os
import sys
import tempfile

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import raystow


def train(config: dict[str, int]) -> None:
    """The training function of each worker."""
    torch.set_num_threads(1)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2))  # with dropout
    tokens = torch.randint(128, (64, 32), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=config["steps"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    with raystow.ray_train.Checkpointer() as checkpointer:
        checkpointing = raystow.huggingface.Checkpointing(checkpointer, every_n_steps=3)
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[checkpointing])
        trainer.train(resume_from_checkpoint=checkpointing.resume(trainer))


if __name__ == "__main__":
    folder = sys.argv[1] if "://" in sys.argv[1] else os.path.abspath(sys.argv[1])
    ray.init(log_to_driver=False)
    result = TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[2]) if len(sys.argv) > 2 else 6},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="gpt2",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    version = raystow.ray_train.version_of(result.checkpoint)
    print(f"version {version.id}: step {version.step}, loss {version.metrics['loss']:.6f}")
