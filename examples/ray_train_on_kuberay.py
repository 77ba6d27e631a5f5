"""Train with Ray Train and FSDP2 on a cluster whose nodes may fail or be drained. The RayJob in ``k8s/`` runs this script.

    python examples/ray_train_on_kuberay.py URI STEPS WORKERS [--cpu]

``URI``: the repository, ``s3://bucket/prefix`` or a folder that all nodes share. ``WORKERS``: the number of GPUs, or of CPUs
with ``--cpu``, for a small model. When a node is announced to be removed, all workers save; training continues from that version
when ``WORKERS`` workers are available. Start the script again to continue a run.
"""

import argparse
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raystow

EVERY = 100  # steps between saves


def train(config: dict[str, Any]) -> None:
    """The training function of each worker."""
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    width, layers = config["width"], config["layers"]
    block = [torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)]
    model = torch.nn.Sequential(*block).to(device)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    every = raystow.Interval(steps=EVERY)
    with raystow.Checkpointer(config["uri"], interval=every) as checkpointer:  # the end of the block waits for the last save
        checkpointer.guard(optimizer)  # an optimizer step waits until the tensors have been read
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if checkpointer.restore_latest(into=state):
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        else:
            optimizer.state.clear()  # get_state_dict has counted a step

        for step in range(state["step"] + 1, config["steps"] + 1):
            seed = torch.Generator(device).manual_seed(1000 * step + rank)
            data = torch.randn(8, 128, width, device=device, generator=seed)
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            due = checkpointer.due(step)  # the same on all workers; also when a node will be removed
            if due or step == config["steps"]:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step}
                distributed.all_reduce(loss.detach())  # in place: the sum over all ranks
                checkpointer.save(state, step=step, metrics={"loss": loss.item() / world})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("steps", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    size = {"width": 64, "layers": 2} if args.cpu else {"width": 1024, "layers": 10}  # 126 million parameters
    ray.init(log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"uri": args.uri, "steps": args.steps, **size},
        torch_config=TorchConfig(backend="gloo" if args.cpu else "nccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
        # Announced removals do not count as failures.
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=10)),
    ).fit()
    for version in raystow.open(args.uri).versions():
        print(f"version {version.id}: step {version.step}, loss {version.metrics['loss']:.4f}, {version.bytes:,} bytes")
