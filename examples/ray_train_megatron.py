"""Train a GPT with Megatron-Core under Ray Train; killed workers resume, also with another layout.

    python examples/ray_train_megatron.py URI [STEPS [WORKERS [TENSOR_PARALLEL]]]

``URI``: the repository, ``s3://bucket/prefix`` or a folder that all nodes share. To continue a run, start it again with more
steps and any number of workers. Uses the Ray cluster of this machine or starts one. Without GPUs, Megatron runs on CPU workers.
"""

import os
import sys
from typing import Any

import ray
import ray.train
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from ray.train.torch import TorchTrainer

import raystow
import raystow.megatron

LENGTH, VOCABULARY, EVERY = 32, 128, 2


def train(config: dict[str, Any]) -> None:
    """The training function of each worker."""
    if not torch.cuda.is_available():
        from megatron_on_cpu import replace_cuda

        replace_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config["tensor_parallel"])
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    settings = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=config["tensor_parallel"],
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(settings, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).cuda()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(settings, ddp, Float16Module(settings, gpt))
    options = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [model])

    def state(step: int, *, is_loading: bool = False) -> dict[str, Any]:
        weights = gpt.sharded_state_dict()
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading), "step": step}

    first = 1
    with raystow.Checkpointer(config["uri"]) as checkpointer:  # the end of the block waits for the last save
        loaded = raystow.megatron.load(checkpointer, state(0, is_loading=True))  # from any layout
        if loaded is not None:
            gpt.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            first = loaded["step"] + 1
        for step in range(first, config["steps"] + 1):
            data = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
            tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=data).cuda()
            positions = torch.arange(LENGTH).expand(4, -1).cuda()
            mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1).cuda()
            model.zero_grad_buffer()
            loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
            loss.backward()
            finalize_model_grads([model])
            checkpointer.fence()  # a step waits until the tensors have been read
            optimizer.step()
            if step % EVERY == 0:
                torch.distributed.all_reduce(loss.detach())  # in place: the sum over all ranks
                metrics = {"loss": loss.item() / checkpointer.world_size, "first": first}
                raystow.megatron.save(checkpointer, state(step), step=step, metrics=metrics)


if __name__ == "__main__":
    uri = sys.argv[1] if "://" in sys.argv[1] else os.path.abspath(sys.argv[1])
    steps, workers, tensor_parallel_size = (*map(int, sys.argv[2:]), *(10, 2, 1)[len(sys.argv) - 2 :])
    ray.init(log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"uri": uri, "steps": steps, "tensor_parallel": tensor_parallel_size},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()
    version = raystow.latest(uri)
    assert version is not None
    print(f"began at step {version.metrics['first']}, ended at step {version.step}, loss {version.metrics['loss']}")
