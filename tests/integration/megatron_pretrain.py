"""Megatron's own training loop on a CPU, as one rank: ``python megatron_pretrain.py URI [Megatron's arguments]``.

Prints a line for each step with its loss as a hexadecimal float, on the last rank.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import Any

import ray
import torch

from integration.megatron_ranks import replace_cuda

replace_cuda()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.training import arguments, get_args, initialize, training  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

SMALL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "60", "--make-vocab-size-divisible-by", "8", "--mock-data"),
    *("--transformer-impl", "local", "--bf16", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"),
    *("--use-distributed-optimizer", "--swiglu", "--disable-bias-linear", "--no-bias-swiglu-fusion", "--log-interval", "1"),
    *("--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--eval-iters", "0"),
    *("--eval-interval", "1000", "--lr-decay-style", "linear", "--lr-decay-iters", "100", "--lr-warmup-iters", "3"),
    *("--use-cpu-initialization", "--dataloader-type", "external"),
    *("--no-create-attention-mask-in-dataloader", "--ckpt-format", "torch_dist", "--no-check-for-nan-in-loss-and-grad"),
]


def model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> Any:
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    )


def forward(data: Any, gpt: Any, *_: Any) -> Any:
    args = get_args()
    from megatron.core import mpu

    first = args.consumed_train_samples * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(first)
    batch = torch.randint(60, (args.micro_batch_size, args.seq_length + 1), generator=generator)
    mask = torch.triu(torch.ones(args.seq_length, args.seq_length, dtype=torch.bool), 1)[None, None]
    ids, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    output = gpt(ids, torch.arange(args.seq_length).expand(len(batch), -1), mask, labels=labels)

    def loss(losses: torch.Tensor) -> Any:
        mean = losses.float().mean()
        if mpu.get_tensor_model_parallel_rank() == 0:
            print(f"loss {first} {mean.item().hex()}", flush=True)
        return mean, {"lm loss": mean.detach()}

    return output, loss


def datasets(sizes: Any, **_: Any) -> Any:
    """Iterators of what ``forward`` does not use. A DataLoader would draw from the generator that dropout uses on a CPU."""
    return itertools.repeat(0), None, None


def with_devices(initialize: Any) -> Any:
    """Make groups of ranks, which Megatron leaves out without a device."""

    def made(*args: Any, **kwargs: Any) -> Any:
        count, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
        try:
            return initialize(*args, **kwargs)
        finally:
            torch.cuda.device_count = count

    return made


def main() -> None:
    import raystow.megatron

    uri, *chosen = sys.argv[1:]
    sys.argv[1:] = SMALL + chosen
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    if uri:
        raystow.megatron.install(uri)
    initialize._compile_dependencies = lambda: None
    arguments.get_device_arch_version = lambda: 10
    torch.distributed.init_process_group("gloo")
    training.initialize_megatron = with_devices(functools.partial(training.initialize_megatron, allow_no_cuda=True))
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args)
    training.pretrain(config, datasets, ModelType.encoder_or_decoder, forward, model_provider=model)


if __name__ == "__main__":
    main()
